"""Trackers of every kind, and batches that try to break them: all from one seed.

Shapes: G (B, D) samples, g (D,) a gradient, U (D, K) a basis.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from dome.trackers import TRACKERS, Tracker
from dome.trackers.blocks import Blockwise
from dome.trackers.linalg import Shard

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
