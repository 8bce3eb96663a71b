"""Where does the time of a filtered step go, and how near is each part to its floor?

Floors are products at this machine's own sgemm rate and bytes at its own copy rate; the
network's flops are counted by torch. The extra cost of taking samples is the difference
of forward and backward with and without capture, within a round. Update and filter are
also measured on their own, on random samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dome.filter import GradientFilter
from dome_lab.bench import floor
from dome_lab.bench.by_batch_size import SMOKE, Config
from dome_lab.bench.questions import portion
from dome_lab.bench.tables import TextTable, milliseconds, percent
from dome_lab.bench.timing import (
    Pace,
    Round,
    Variant,
    clock_of,
    measure,
    seconds_of,
    spread,
)
from dome_lab.bench.training import Loop, random_samples, updates_to_settle

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.results import Row

SCALES = {
    "smoke": SMOKE,
    "quick": Config(pace=Pace(seconds=15)),
    "usual": Config(pace=Pace(seconds=45)),
    "full": Config(pace=Pace(seconds=90)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return config.expected_seconds(beside=3)


class _Staged:
    """A loop whose step is done in stages, to time each."""

    def __init__(self, loop: Loop, rank: int | None) -> None:
        self.loop = loop
        self._filter = None if rank is None else GradientFilter(loop.model, rank)
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self.loop.forward()

    def backward(self) -> None:
        if self._loss is not None:
            self._loss.backward()
            self._loss = None

    def filter_(self) -> None:
        if self._filter is not None:
            self._filter.step()

    def step(self) -> None:
        self.forward()
        self.backward()
        self.filter_()
        self.loop.optimizer.step()


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per batch size and part."""
    rows: list[Row] = []
    for i, batch_size in enumerate(config.batch_sizes):
        told = portion(tell, f"parts, B = {batch_size}", i, len(config.batch_sizes))
        stages, clock = _stages(config, batch_size), clock_of(config.device)
        rounds = measure(stages, config.pace, told, clock)
        rows += _rows(rounds, _floors(config, batch_size), batch_size)
    return rows


def _stages(config: Config, batch_size: int) -> list[Variant]:
    plain, ours = (
        _Staged(Loop(config.setting, batch_size, device=config.device), rank)
        for rank in (None, config.rank)
    )
    for _ in range(updates_to_settle(batch_size, config.rank)):
        ours.step()
    alone, samples = _filter_alone(config, batch_size)

    def update() -> None:
        samples.append(samples.pop(0))
        alone.observe(samples[0])

    def stage(name: str, run: Callable[[], object]) -> Variant:
        # Stages follow each other within a step: nothing may come between them.
        return Variant(name, run, num_settle=0, num_warmup=0)

    return [
        stage("settle plain", plain.step),
        stage("forward", plain.forward),
        stage("backward", plain.backward),
        stage("optimizer", plain.loop.optimizer.step),
        stage("settle ours", ours.step),
        stage("forward, captured", ours.forward),
        stage("backward, captured", ours.backward),
        stage("update and filter", ours.filter_),
        stage("optimizer, captured", ours.loop.optimizer.step),
        Variant("update alone", update),
        Variant("filter alone", alone.filter_),
    ]


def _filter_alone(
    config: Config, batch_size: int
) -> tuple[GradientFilter, list[Tensor]]:
    """A filter whose model never runs, and random samples for it."""
    model = Loop(config.setting, batch_size, device=config.device).model
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=random).to(config.device)
    alone = GradientFilter(model, config.rank)
    dim = sum(p.numel() for p in model.parameters())
    samples = random_samples(dim, config.rank, batch_size, config.device)
    for i in range(updates_to_settle(batch_size, config.rank)):
        alone.observe(samples[i % len(samples)])
    return alone, samples


def _floors(config: Config, batch_size: int) -> dict[str, tuple[float, str]]:
    """Least seconds of each part, and what sets them."""
    K, place = config.rank, config.device
    loop = Loop(config.setting, batch_size, device=place)
    D, clock = loop.dim, clock_of(place)
    copying = floor.copy_rate(device=place, clock=clock)
    square = floor.square_rate(place, clock)
    forward, backward = _network_flops(loop)
    products = floor.update_products(D, K, batch_size, place, clock)
    update = max(
        (sum(product.seconds for product in products), "flops"),
        (floor.update_bytes(D, K, batch_size) / copying, "bytes"),
    )
    one_basis, one_vector = floor.FLOAT32 * D * K, floor.FLOAT32 * D
    return {
        "forward": (forward / square, "flops"),
        "backward": (backward / square, "flops"),
        "samples": (floor.samples_bytes(D, batch_size) / copying, "bytes"),
        "update and filter": update,
        "update alone": update,
        "filter alone": (2 * one_basis / copying, "bytes"),  # Uᵀ g, then U c
        "optimizer": (5 * one_vector / copying, "bytes"),  # 3 read, 2 written
    }


def _network_flops(loop: Loop) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        loss = loop.forward()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def _rows(
    rounds: Sequence[Round], floors: dict[str, tuple[float, str]], batch_size: int
) -> list[Row]:
    seconds = {name: seconds_of(rounds, name) for name in rounds[0]}
    seconds["samples"] = [
        r["forward, captured"] + r["backward, captured"] - r["forward"] - r["backward"]
        for r in rounds
    ]
    whole = ("forward", "backward", "samples", "update and filter", "optimizer")
    total = sum(spread(seconds[part]).median for part in whole)
    rows: list[Row] = []
    for part in (*whole, "update alone", "filter alone"):
        s, (least, kind) = spread(seconds[part]), floors[part]
        rows.append(
            {
                "batch_size": batch_size,
                "part": part,
                "num_rounds": len(rounds),
                "median": s.median,
                "low": s.low,
                "high": s.high,
                "share": s.median / total if part in whole else None,
                "floor": least,
                "floor_kind": kind,
                "efficiency": least / s.median if s.median > 0 else None,
                "seconds": seconds[part],
            }
        )
    return rows


def table(rows: list[Row]) -> TextTable:
    """Parts by batch size: time, share of the step, floor, and how near to it."""
    lines = [
        [
            f"B = {row['batch_size']}: {row['part']}",
            f"{milliseconds(row['median'])} "
            f"({row['low'] * 1e3:.3g} - {row['high'] * 1e3:.3g})",
            "" if row["share"] is None else percent(row["share"]),
            f"{milliseconds(row['floor'])} ({row['floor_kind']})",
            "-" if row["efficiency"] is None else percent(row["efficiency"]),
        ]
        for row in rows
    ]
    return TextTable(
        "Parts of a filtered step and their floors on this machine",
        ("", "time", "share", "floor", "floor / time"),
        lines,
        [
            "Medians, quartiles in brackets. Update and filter alone run on random "
            "samples and are not part of the sum."
        ],
    )
