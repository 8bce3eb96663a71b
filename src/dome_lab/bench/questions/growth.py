"""How does the time of an update grow with d, k and B?

The tracker alone, on random samples. The slope of log time against the log of each
letter, and of all points together against k² d + B k d, the growth that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dome.trackers import StreamingPower
from dome_lab.bench.questions import portion
from dome_lab.bench.tables import TextTable, milliseconds
from dome_lab.bench.timing import Pace, Variant, clock_of, measure, seconds_of, spread
from dome_lab.bench.training import random_samples, updates_to_settle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dome_lab.bench.questions import Tell
    from dome_lab.bench.results import Row

LETTERS = {"dim": "d", "rank": "k", "batch_size": "B"}
# Largest slope that k² d + B k d allows.
LIMITS = {"dim": 1.0, "rank": 2.0, "batch_size": 1.0}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: where each letter goes while the others stay; ``pace`` of a letter."""

    dim: int = 80_000
    rank: int = 100
    batch_size: int = 32
    dims: Sequence[int] = (20_000, 40_000, 80_000, 160_000, 320_000)
    ranks: Sequence[int] = (25, 50, 100, 200, 400)
    batch_sizes: Sequence[int] = (8, 16, 32, 64, 128, 256)
    pace: Pace = field(default_factory=lambda: Pace(seconds=20))
    device: str = "cpu"


SCALES = {
    "smoke": Config(
        dim=200,
        rank=4,
        batch_size=6,
        dims=(200, 400),
        ranks=(4, 8),
        batch_sizes=(6, 12),
        pace=Pace(seconds=0, least=2),
    ),
    "quick": Config(
        dims=(20_000, 40_000, 80_000),
        ranks=(25, 50, 100),
        batch_sizes=(8, 32, 128),
        pace=Pace(seconds=6, least=3),
    ),
    "usual": Config(),
    "full": Config(pace=Pace(seconds=60)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return 1.2 * 3 * config.pace.seconds


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per letter and value, with the slope of its letter."""
    usual = {k: getattr(config, k) for k in LETTERS}
    ways = {
        "dim": config.dims,
        "rank": config.ranks,
        "batch_size": config.batch_sizes,
    }
    rows: list[Row] = []
    for i, (letter, values) in enumerate(ways.items()):
        told = portion(tell, f"growth with {LETTERS[letter]}", i, len(ways))
        points = [usual | {letter: value} for value in values]
        variants = [_variant(str(p[letter]), config.device, **p) for p in points]
        rounds = measure(variants, config.pace, told, clock_of(config.device))
        medians = [spread(seconds_of(rounds, v.name)) for v in variants]
        slope = loglog_slope(values, [m.median for m in medians])
        rows += [
            {
                "letter": letter,
                **point,
                "num_rounds": len(rounds),
                "median": m.median,
                "low": m.low,
                "high": m.high,
                "slope": slope,
                "seconds": seconds_of(rounds, str(point[letter])),
            }
            for point, m in zip(points, medians, strict=True)
        ]
    return rows


def _variant(name: str, device: str, dim: int, rank: int, batch_size: int) -> Variant:
    samples = random_samples(dim, rank, batch_size, device)
    tracker = StreamingPower(dim, rank, device=device)

    def update() -> None:
        samples.append(samples.pop(0))
        tracker.update(samples[0])

    settled = updates_to_settle(batch_size, rank)
    return Variant(name, update, num_warmup=settled)


def loglog_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x."""
    u, v = [math.log(a) for a in x], [math.log(b) for b in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    over = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True))
    return over / sum((a - mean_u) ** 2 for a in u)


def allowed_work(row: Row) -> int:
    """k² d + B k d."""
    return int(row["dim"] * row["rank"] * (row["rank"] + row["batch_size"]))


def table(rows: list[Row]) -> TextTable:
    """Times along each letter, and slopes."""
    lines = []
    for letter, symbol in LETTERS.items():
        own = [row for row in rows if row["letter"] == letter]
        span = f"{own[0][letter]:,} to {own[-1][letter]:,}"
        times = f"{milliseconds(own[0]['median'])} to {milliseconds(own[-1]['median'])}"
        slope = f"{own[0]['slope']:.2f}"
        lines.append([f"with {symbol}", span, times, slope, f"{LIMITS[letter]:.0f}"])
    work = [allowed_work(row) for row in rows]
    overall = loglog_slope(work, [row["median"] for row in rows])
    lines.append(["with k² d + B k d", "all", "", f"{overall:.2f}", "1"])
    return TextTable(
        "Growth of the time of an update: slopes of log time",
        ("", "from - to", "time", "slope", "at most"),
        lines,
        ["Medians. Slopes below the limit are fixed costs that still show."],
    )


def draw(rows: list[Row]) -> Figure:
    """Time against each letter on logarithmic axes, with the allowed slope."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(LETTERS), sharey=True)
    for axes, (letter, symbol) in zip(panels, LETTERS.items(), strict=True):
        own = [row for row in rows if row["letter"] == letter]
        x = [row[letter] for row in own]
        y = [row["median"] * 1e3 for row in own]
        work = [y[-1] * allowed_work(row) / allowed_work(own[-1]) for row in own]
        axes.loglog(x, y, marker="o", color="#0072B2", linewidth=2.5, label="measured")
        axes.loglog(x, work, color="#555555", linestyle=":", label="k² d + B k d")
        axes.set_title(f"slope {own[0]['slope']:.2f} with {symbol}", loc="left")
        axes.set_xlabel(symbol)
        axes.set_xticks(x, [f"{value:,}" for value in x])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("update, ms")
    panels[0].legend(frameon=False)
    return figure
