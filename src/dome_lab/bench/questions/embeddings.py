"""What does a filtered step cost behind a large embedding?

A batch has few of the words, and an update pays for those (``trackers/parts.py``).
Texts are random. On a CPU processor time is
measured: other work on the machine makes less of a difference to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dome
from dome_lab.bench.questions import portion
from dome_lab.bench.run import TextTable, milliseconds
from dome_lab.bench.timing import (
    Pace,
    Spread,
    Variant,
    clock_of,
    compared,
    measure,
)
from dome_lab.bench.training import updates_to_settle
from dome_lab.paper.models import Transformer
from dome_lab.paper.workers import keep_what_steps_free

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

PLAIN, OURS = "plain", "ours"
NUM_BATCHES, WIDTH, NUM_CLASSES = 40, 64, 70


@dataclass(frozen=True, slots=True)
class Reader:
    """A network that reads texts.

    Attributes:
        build: Makes it, for a number of words and of positions.
        num_words: Its vocabulary.
        batch_size: Texts in a batch.
        rank: Directions that are removed.
        exponent: Of Zipf's law for the words; 0 makes all as frequent. With 1.1 a batch
            has as many of 8,000 words as one of DBPedia-Classes, about 1,750.
        length: Words of a text.
    """

    build: Callable[[int, int], nn.Module]
    num_words: int
    batch_size: int
    rank: int
    exponent: float
    length: int = 64


def one_layer(num_words: int, length: int) -> nn.Module:
    """One encoder layer behind an embedding, and the mean over positions."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
    mean = nn.Sequential(nn.AvgPool2d((length, 1)), nn.Flatten())
    classes = nn.Linear(WIDTH, NUM_CLASSES)
    return nn.Sequential(nn.Embedding(num_words, WIDTH), layer, mean, classes)


def figure_6(num_words: int, length: int) -> nn.Module:
    """The Transformer of the paper's Figure 6."""
    return Transformer(num_words, NUM_CLASSES, length)


FIGURE_6 = "Transformer of the paper's Figure 6"
ONE_LAYER = "one encoder layer, 20,000 words"
READERS = {
    FIGURE_6: Reader(figure_6, 8_000, 128, 70, 1.1),
    ONE_LAYER: Reader(one_layer, 20_000, 16, 64, 0),
    "tiny": Reader(one_layer, 1_100, 5, 3, 0, length=4),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys of ``READERS``; ``pace`` is that of one."""

    pace: Pace
    readers: Sequence[str] = (FIGURE_6, ONE_LAYER)
    device: str = "cpu"


SCALES = {
    "smoke": Config(pace=Pace(seconds=0, least=2), readers=("tiny",)),
    "quick": Config(pace=Pace(seconds=20)),
    "usual": Config(pace=Pace(seconds=60, least=9)),
    "full": Config(pace=Pace(seconds=120, least=9)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return 5 + len(config.readers) * config.pace.seconds


def compute(config: Config, tell: Tell) -> list[Row]:
    """Two rows per network."""
    rows: list[Row] = []
    keep_what_steps_free()
    on_cpu = torch.device(config.device).type == "cpu"
    clock = time.process_time if on_cpu else clock_of(config.device)
    for i, name in enumerate(config.readers):
        reader, told = READERS[name], portion(tell, name, i, len(config.readers))
        warmup = updates_to_settle(reader.batch_size, reader.rank)
        variants = [
            Variant(PLAIN, _step(reader, config.device), num_steps=4),
            Variant(
                OURS,
                _step(reader, config.device, filtered=True),
                num_steps=4,
                num_warmup=warmup,
            ),
        ]
        rounds = measure(variants, config.pace, told, clock)
        facts = {"reader": name, "rank": reader.rank, "B": reader.batch_size}
        rows += [compared(rounds, v.name, PLAIN) | facts for v in variants]
    return rows


def _step(
    reader: Reader, device: str, *, filtered: bool = False
) -> Callable[[], object]:
    """One training step of a new network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = reader.build(reader.num_words, reader.length).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if filtered:
        dome.attach(model, optimizer, reader.rank)
    batches = _batches(reader, device)

    def step() -> None:
        texts, classes = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(texts), classes).backward()
        optimizer.step()

    return step


def _batches(reader: Reader, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    chances = torch.arange(1, reader.num_words + 1) ** -float(reader.exponent)
    B, num = reader.batch_size, reader.batch_size * reader.length
    made = []
    for _ in range(NUM_BATCHES):
        drawn = torch.multinomial(chances, num, replacement=True, generator=random)
        classes = torch.randint(NUM_CLASSES, (B,), generator=random)
        made.append((drawn.view(B, -1).to(device), classes.to(device)))
    return cycle(made)


def table(rows: list[Row]) -> TextTable:
    """Time of a step and ratio to a plain one, by network."""
    lines = [
        [
            f"{row['reader']}, k = {row['rank']}, B = {row['B']}",
            row["variant"],
            milliseconds(row["median"]),
            str(Spread(row["ratio"], row["ratio_low"], row["ratio_high"])),
        ]
        for row in rows
    ]
    notes = ["Medians of processor time, quartiles in brackets."]
    headings = ("", "", "step", "/ plain")
    return TextTable("Time of a step behind an embedding", headings, lines, notes)
