"""Does anything that a batch may contain break a basis?

Hostile updates of both trackers, all layouts and storage formats, drawn from a seed.
After each the basis must be finite and orthonormal, its eigenvalues not negative, the
projection idempotent and never longer than the gradient; a batch that is left out must
change nothing but its count; and a tracker that took the state before must arrive at
the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dome.trackers import TRACKERS, Tracker
from dome.trackers.blocks import Blockwise
from dome.trackers.linalg import Shard
from dome_lab.bench.run import TextTable

if TYPE_CHECKING:
    from torch import Tensor

    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

LAYOUTS = ("global", "global", "layerwise", "workers")  # the cheap one twice
LARGEST_EXPONENT = {torch.float16: 4, torch.float64: 100}  # 18 for the others
LEFT_OUT = {"not a number", "infinite", "one sample", "no sample"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is tracked, and how.

    Attributes:
        tracker: "power" or "svd".
        layout: One of ``LAYOUTS``.
        storage: Of the basis.
        samples: Precision of the samples.
        dim: D.
        rank: K, at most; a layer has no more than its size.
        options: Of the tracker.
    """

    tracker: str
    layout: str
    storage: torch.dtype
    samples: torch.dtype
    dim: int
    rank: int
    options: Mapping[str, Any]


def draw_setting(rng: Random) -> Setting:
    """Any of them: bases of a few rows, and long ones, which are kept as products."""
    f32, f64, b16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    dim = rng.choice([1, 2, 3, 7, 33, 70, 129, 260])
    rank = rng.randint(1, min(dim, rng.choice([2, 8, 20])))
    return Setting(
        tracker=rng.choice(tuple(TRACKERS)),
        layout=rng.choice(LAYOUTS),
        storage=rng.choice([f32, f32, f64, b16]),
        samples=rng.choice([f32, f32, f32, f64, b16, f16]),
        dim=dim,
        rank=rank,
        options={
            "oversample": rng.choice([0, 0, 1, rank]),
            "forget": rng.choice([None, None, 0.05, 0.9]),
            "factored": rng.random() < 0.8,
        },
    )


class Workers:
    """Trackers that hold the rows of one basis apart, as workers do, in one process.

    Args:
        make: The tracker's class.
        dim: D.
        rank: K.
        num: How many workers there are.
        **options: Of each tracker.
    """

    def __init__(
        self,
        make: Any,  # noqa: ANN401 (a class out of TRACKERS)
        dim: int,
        rank: int,
        num: int,
        **options: Any,  # noqa: ANN401 (those of the tracker)
    ) -> None:
        length = -(-dim // num)
        edges = [min(dim, i * length) for i in range(num + 1)]
        self._rows = [slice(a, b) for a, b in pairwise(edges)]
        self._parts: list[tuple[Tensor, ...]] = [()] * num
        self._barrier = Barrier(num, timeout=60)
        shards = [
            Shard(dim, (r,), partial(self._total, i)) for i, r in enumerate(self._rows)
        ]
        self.trackers = self._side_by_side(
            [partial(make, dim, rank, shard=shard, **options) for shard in shards]
        )
        # What each has drawn alone is no part of a common basis.
        self.load_state_dict(make(dim, rank, **options).state_dict())

    def update(self, grads: Tensor, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into the estimate."""
        pairs = zip(self.trackers, self._rows, strict=True)
        self._side_by_side([partial(t.update, grads[:, r], scale) for t, r in pairs])

    def project_out(self, gradient: Tensor) -> Tensor:
        """g without its part in the span, shape (D,)."""
        pairs = zip(self.trackers, self._rows, strict=True)
        calls = [partial(t.project_out, gradient[rows]) for t, rows in pairs]
        return torch.cat(self._side_by_side(calls))

    def state_dict(self) -> dict[str, Tensor]:
        """That of one tracker with all the rows; workers must have the same of it."""
        first, *others = [tracker.state_dict() for tracker in self.trackers]
        for name, value in first.items():
            if name != "basis" and not all(value.equal(s[name]) for s in others):
                raise RuntimeError(f"workers have different {name!r}")
        return first | {"basis": torch.cat([s["basis"] for s in (first, *others)])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Each takes its rows."""
        for tracker in self.trackers:
            tracker.load_state_dict(state)

    def _total(self, worker: int, *sums: Tensor) -> tuple[Tensor, ...]:
        """What all workers have given, added up; each waits for the others."""
        self._parts[worker] = sums
        self._barrier.wait()
        whole = tuple(torch.stack(c).sum(dim=0) for c in zip(*self._parts, strict=True))
        self._barrier.wait()
        return whole

    def _side_by_side(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each worker's call returned; a thread is a worker."""

        def run(call: Callable[[], Any]) -> Any:  # noqa: ANN401
            try:
                return call()
            except BaseException:
                self._barrier.abort()  # or the others would wait
                raise

        with ThreadPoolExecutor(len(calls)) as pool:
            running = [pool.submit(run, call) for call in calls]
            errors = [error for r in running if (error := r.exception())]
        for error in errors:
            if not isinstance(error, BrokenBarrierError) or len(errors) == len(calls):
                raise error
        return [r.result() for r in running]


Tracked = Tracker | Blockwise | Workers


def make_tracked(setting: Setting) -> Tracked:
    """A tracker, one per layer, or one over workers."""
    make, dim, rank = TRACKERS[setting.tracker], setting.dim, setting.rank
    options: dict[str, Any] = {**setting.options, "dtype": setting.storage}
    if setting.layout == "workers":
        return Workers(make, dim, rank, 3 if dim % 4 == 3 else 2, **options)
    if setting.layout == "global":
        return make(dim, rank, **options)
    edges = [0, dim // 3, dim]
    pairs = [(a, b) for a, b in pairwise(edges) if a < b]
    trackers: dict[str, Tracker] = {
        f"{a} to {b}": make(b - a, min(rank, b - a), **options) for a, b in pairs
    }
    return Blockwise(trackers, [slice(a, b) for a, b in pairs])


def bases_of(tracked: Tracked) -> list[tuple[Tensor, Tensor]]:
    """Every U (D, K) and its eigenvalues (K,)."""
    if isinstance(tracked, Workers):
        shards = tracked.trackers
        return [(torch.cat([t.basis for t in shards]), shards[0].eigenvalues)]
    return [(t.basis, t.eigenvalues) for t in trackers_of(tracked)]


def trackers_of(tracked: Tracked) -> list[Tracker]:
    """All of them."""
    if isinstance(tracked, Workers):
        return list(tracked.trackers)
    return list(tracked.by_name.values()) if hasattr(tracked, "by_name") else [tracked]


def draw_kind(rng: Random) -> str:
    """A kind of batch; those that are left out are rarer than others."""
    return rng.choice(
        [kind for kind in BATCHES for _ in range(4 - 3 * (kind in LEFT_OUT))]
    )


def draw_batch(
    setting: Setting, kind: str, size: float, rng: Random, noise: torch.Generator
) -> tuple[Tensor, float]:
    """Samples (B, D) of a kind, about ``size`` long, and the factor they come with."""
    B, D = rng.choice([2, 3, 5, 12, 40]), setting.dim
    B = 530 if rng.random() < 0.001 else B  # more than a tracker takes at once
    G = torch.randn(B, D, generator=noise, dtype=torch.float64)
    G = BATCHES[kind](G, rng) * (size / D**0.5)
    if kind in ("largest", "subnormal"):
        limits = torch.finfo(setting.samples)
        G = G / G.abs().max() * (limits.max if kind == "largest" else 9 * limits.tiny)
        G = G.clamp(-limits.max, limits.max)
    # A transposed view now and then: rows need not be contiguous.
    G = G.T.contiguous().T if rng.random() < 0.1 else G
    return G.to(setting.samples), rng.choice([1.0, float(B), 2.0**-16, 1e-8, 1e8])


Changed = Callable[[Tensor, Random], Tensor]


def _mixed(G: Tensor, rng: Random, shape: tuple[int, int]) -> Tensor:
    exponents = [rng.uniform(-18, 18) for _ in range(max(shape))]
    return G * 10.0 ** torch.tensor(exponents, dtype=G.dtype).view(shape)


def _with_one(value: float) -> Changed:
    def changed(G: Tensor, rng: Random) -> Tensor:
        G[rng.randrange(G.shape[0]), rng.randrange(G.shape[1])] = value
        return G

    return changed


def _one_too_long(G: Tensor, rng: Random) -> Tensor:
    G[rng.randrange(len(G))] *= 1e11
    return G


# What is done to a batch of normal numbers.
BATCHES: dict[str, Changed] = {
    "plain": lambda G, _: G,
    "low rank": lambda G, _: G[:, :1] @ G[:1] + 1e-3 * G,
    "long mean": lambda G, _: G + 1e4 * G[0],
    "zero": lambda G, _: 0 * G,
    "constant": lambda G, _: G[:1].expand_as(G),
    "two samples": lambda G, _: torch.cat([G[:1], G[1:2].expand_as(G[1:])]),
    "one column": lambda G, _: G * torch.eye(G.shape[1])[0],
    "one far too long": _one_too_long,
    "mixed samples": lambda G, rng: _mixed(G, rng, (len(G), 1)),
    "mixed columns": lambda G, rng: _mixed(G, rng, (1, G.shape[1])),
    "largest": lambda G, _: G,
    "subnormal": lambda G, _: G,
    "not a number": _with_one(float("nan")),
    "infinite": _with_one(float("inf")),
    "one sample": lambda G, _: G[:1],
    "no sample": lambda G, _: G[:0],
}

UPDATES_A_WORLD = 25
# By storage: |UᵀU − I|, and the projection's error as a share of the gradient. Eight
# bits are 2⁻⁹ off an entry, and a basis of three rows has nothing to average over.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the question."""

    num_updates: int = 100_000
    seed: int = 0


SCALES = {
    "smoke": Config(num_updates=500),
    "quick": Config(num_updates=2_000),
    "usual": Config(num_updates=10_000),
    "full": Config(),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return 0.006 * config.num_updates


@dataclass
class Found:
    """What came out for one tracker, layout and storage format."""

    num_updates: int = 0
    num_left_out: int = 0
    orthogonality: float = 0.0
    idempotence: float = 0.0
    longer: float = 0.0
    broken: list[str] = field(default_factory=list)


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per tracker, layout and storage format."""
    found: dict[tuple[str, str, str], Found] = {}
    num_worlds = -(-config.num_updates // UPDATES_A_WORLD)
    for world in range(num_worlds):
        tell("hostile updates", world / num_worlds)
        rng = Random(f"{config.seed} {world}")
        setting = draw_setting(rng)
        key = (
            setting.tracker,
            setting.layout,
            str(setting.storage).removeprefix("torch."),
        )
        own = found.setdefault(key, Found())
        for problem in _live(setting, rng, own):
            own.broken.append(f"seed {config.seed}, world {world}: {problem}")
    names = ("tracker", "layout", "storage")
    return [
        dict(zip(names, key, strict=True)) | vars(own)
        for key, own in sorted(found.items())
    ]


@torch.no_grad()
def _live(setting: Setting, rng: Random, found: Found) -> Iterator[str]:
    """Take a tracker through its updates; what went wrong, after which it ends."""
    noise = torch.Generator().manual_seed(rng.getrandbits(60))
    tracked, twin = (make_tracked(setting) for _ in range(2))
    most = LARGEST_EXPONENT.get(setting.samples, 18)
    size = 10 ** rng.uniform(-most, most)
    for number in range(UPDATES_A_WORLD):
        kind = draw_kind(rng)
        if rng.random() < 0.1:  # the scale of gradients jumps
            size = 10 ** rng.uniform(-most, most)
        G, scale = draw_batch(setting, kind, size, rng, noise)
        problem = _updated(tracked, twin, G, scale, kind, found)
        problem = problem or _invariants(tracked, setting, noise, found)
        if problem:
            yield f"update {number} ({kind}, {tuple(G.shape)}) of {setting}: {problem}"
            return


def _updated(
    tracked: Tracked,
    twin: Tracked,
    G: Tensor,
    scale: float,
    kind: str,
    found: Found,
) -> str:
    """Update both, the twin from a state; what differs from what should be, if any."""
    before = tracked.state_dict()
    basis = {name: t.clone() for name, t in before.items()}
    skipped = _num_skipped(tracked)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dome left a batch out")
            twin.load_state_dict(before)
            tracked.update(G, scale)
            twin.update(G, scale)
        after, resumed = tracked.state_dict(), twin.state_dict()
    except Exception as error:  # noqa: BLE001 (any is a finding)
        return f"{type(error).__name__}: {error}"
    found.num_updates += len(bases_of(tracked))
    left_out = _num_skipped(tracked) - skipped
    found.num_left_out += left_out > 0
    if not _equal(before, basis):
        return "the update changed a state that was taken before it"
    if not _equal(after, resumed):
        return "a resumed tracker has other bits"
    # U may have been measured meanwhile: that is no change.
    kept = ("num_skipped", "orthogonality_error")
    everywhere = left_out == len(trackers_of(tracked))
    if everywhere and not _equal(before, after, but=kept):
        return "a batch that was left out changed something"
    if kind in LEFT_OUT and not left_out:
        return "was let in"
    return ""


def _num_skipped(tracked: Tracked) -> int:
    return sum(t.num_skipped for t in trackers_of(tracked))


def _equal(
    one: dict[str, Tensor], other: dict[str, Tensor], but: tuple[str, ...] = ()
) -> bool:
    """Whether two states have the same bits, apart from some entries."""
    names = [name for name in one if not name.endswith(but)]
    return all(one[name].equal(other[name]) for name in names)


def _invariants(
    tracked: Tracked, setting: Setting, noise: torch.Generator, found: Found
) -> str:
    """What is not as it must be after every update, if anything."""
    limit = LIMITS[setting.storage]
    for U, values in bases_of(tracked):
        if not (U.isfinite().all() and values.isfinite().all()):
            return "not finite"
        if (values < 0).any():
            return f"an eigenvalue is {values.min():.2g}"
        present = U[:, U.any(dim=0)].double()
        eye = torch.eye(present.shape[1], dtype=torch.float64)
        error = (present.T @ present - eye).abs().amax() if len(eye) else eye.sum()
        found.orthogonality = max(found.orthogonality, float(error))
        if not error <= limit:
            return f"|UᵀU − I| is {error:.2g}"
    precise = setting.storage == torch.float64
    g = torch.randn(setting.dim, generator=noise, dtype=torch.float64)
    g = g.to(torch.float64 if precise else torch.float32)
    once = tracked.project_out(g)
    twice, length = tracked.project_out(once), g.double().norm()
    again = float((twice - once).double().norm() / length)
    longer = float(once.double().norm() / length) - 1
    found.idempotence = max(found.idempotence, again)
    found.longer = max(found.longer, longer)
    if not again <= limit or not longer <= limit:
        return f"projecting twice differs by {again:.2g}, is longer by {longer:.2g}"
    return ""


def table(rows: list[Row]) -> TextTable:
    """The worst of each kind."""
    lines = [
        [
            ", ".join(row[name] for name in ("tracker", "layout", "storage")),
            f"{row['num_updates']:,}",
            f"{row['num_left_out']:,}",
            *(f"{row[name]:.1e}" for name in ("orthogonality", "idempotence")),
            f"{max(row['longer'], 0):.1e}",
            str(len(row["broken"])),
        ]
        for row in rows
    ]
    total = sum(row["num_updates"] for row in rows)
    return TextTable(
        f"{total:,} hostile updates",
        ("", "updates", "left out", "|UᵀU − I|", "twice", "longer", "broken"),
        lines,
        [problem for row in rows for problem in row["broken"][:3]],
    )
