"""Does anything that a batch may contain break a basis?

Hostile updates of both trackers, all layouts and storage formats, drawn from a seed.
After each the basis must be finite and orthonormal, its eigenvalues not negative, the
projection idempotent and never longer than the gradient; a batch that is left out must
change nothing but its count; and a tracker that took the state before must arrive at
the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import torch

from dome_lab.bench import hostile
from dome_lab.bench.hostile import Setting
from dome_lab.bench.tables import TextTable

if TYPE_CHECKING:
    from torch import Tensor

    from dome_lab.bench.questions import Tell
    from dome_lab.bench.results import Row

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
        setting = hostile.draw_setting(rng)
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
    tracked, twin = (hostile.make_tracked(setting) for _ in range(2))
    most = hostile.LARGEST_EXPONENT.get(setting.samples, 18)
    size = 10 ** rng.uniform(-most, most)
    for number in range(UPDATES_A_WORLD):
        kind = hostile.draw_kind(rng)
        if rng.random() < 0.1:  # the scale of gradients jumps
            size = 10 ** rng.uniform(-most, most)
        G, scale = hostile.draw_batch(setting, kind, size, rng, noise)
        problem = _updated(tracked, twin, G, scale, kind, found)
        problem = problem or _invariants(tracked, setting, noise, found)
        if problem:
            yield f"update {number} ({kind}, {tuple(G.shape)}) of {setting}: {problem}"
            return


def _updated(
    tracked: hostile.Tracked,
    twin: hostile.Tracked,
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
    found.num_updates += len(hostile.bases_of(tracked))
    left_out = _num_skipped(tracked) - skipped
    found.num_left_out += left_out > 0
    if not _equal(before, basis):
        return "the update changed a state that was taken before it"
    if not _equal(after, resumed):
        return "a resumed tracker has other bits"
    # U may have been measured meanwhile: that is no change.
    kept = ("num_skipped", "orthogonality_error")
    everywhere = left_out == len(hostile.trackers_of(tracked))
    if everywhere and not _equal(before, after, but=kept):
        return "a batch that was left out changed something"
    if kind in hostile.LEFT_OUT and not left_out:
        return "was let in"
    return ""


def _num_skipped(tracked: hostile.Tracked) -> int:
    return sum(t.num_skipped for t in hostile.trackers_of(tracked))


def _equal(
    one: dict[str, Tensor], other: dict[str, Tensor], but: tuple[str, ...] = ()
) -> bool:
    """Whether two states have the same bits, apart from some entries."""
    names = [name for name in one if not name.endswith(but)]
    return all(one[name].equal(other[name]) for name in names)


def _invariants(
    tracked: hostile.Tracked, setting: Setting, noise: torch.Generator, found: Found
) -> str:
    """What is not as it must be after every update, if anything."""
    limit = LIMITS[setting.storage]
    for U, values in hostile.bases_of(tracked):
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
