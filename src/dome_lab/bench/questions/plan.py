"""Is the time that ``dome.plan`` predicts what a filter adds to a step?

Five networks, as many ways of keeping a basis. Plain and filtered steps take turns, on
one thread; seconds are those of the process, so that other work on the machine does not
count. What is added is held against the plan of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dome
from dome_lab.bench.questions import portion
from dome_lab.bench.run import TextTable, milliseconds
from dome_lab.bench.timing import Pace, Variant, measure, seconds_of, spread
from dome_lab.bench.training import updates_to_settle
from dome_lab.paper.models import Transformer, relu_mlp, resnet8, tanh_cnn

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.run import Row

ALLOWED = 0.3  # of what is added
NUM_WORDS, LENGTH = 2000, 64
PLAIN = "plain"


class Language(nn.Module):
    """A small GPT of torch's own layers, from words (B, T) to logits (B, T, words)."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, NUM_WORDS, bias=False)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits of the next word at each place."""
        x = self.words(texts) + self.places[: texts.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def next_words(logits: Tensor, texts: Tensor) -> Tensor:
    """Cross-entropy of the next word."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten())


Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a batch of it, and how its basis is kept."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rank: int
    batch_size: int
    choice: int = 0  # among those of a plan
    loss_fn: Loss = cross_entropy
    num_classes: int = 10

    def batch(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        shape = (self.batch_size, *self.shape)
        if len(self.shape) > 1:
            x = torch.randn(shape, generator=random)
        else:
            x = torch.randint(1, NUM_WORDS, shape, generator=random)
        if self.loss_fn is next_words:
            return x, x
        y = torch.randint(self.num_classes, (len(x),), generator=random)
        return x, y


_GPT = Case("GPT", Language, (LENGTH,), 16, 8, loss_fn=next_words)
CASES = {
    "mlp": Case("MLP", relu_mlp, (1, 28, 28), 100, 64),
    "cnn": Case("CNN", tanh_cnn, (1, 28, 28), 50, 32, choice=2),
    "resnet8": Case("ResNet-8", resnet8, (3, 32, 32), 100, 16),
    "transformer": Case(
        "Transformer", lambda: Transformer(NUM_WORDS, 14, LENGTH), (LENGTH,), 70, 32
    ),
    "gpt": _GPT,
    "gpt, direction_rank": replace(_GPT, choice=6),
    "small": Case("CNN", tanh_cnn, (1, 28, 28), 3, 5),  # for tests
}
MEASURED = tuple(CASES)[:-1]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which cases, by name, and how long each."""

    pace: Pace
    cases: Sequence[str] = MEASURED
    device: str = "cpu"  # seconds of the process are those of its processors


SCALES = {
    "smoke": Config(cases=("small",), pace=Pace(seconds=0, least=2)),
    "quick": Config(pace=Pace(seconds=5)),
    "usual": Config(pace=Pace(seconds=20, least=7)),
    "full": Config(pace=Pace(seconds=60, least=9)),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return len(config.cases) * (20 + config.pace.seconds)


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per case."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _row(CASES[name], config.pace, portion(tell, name, i, len(config.cases)))
            for i, name in enumerate(config.cases)
        ]
    finally:
        torch.set_num_threads(threads)


def _row(case: Case, pace: Pace, tell: Callable[[float], None]) -> Row:
    random = torch.Generator().manual_seed(0)
    model = _built(case)
    x, y = case.batch(random)
    planned = dome.plan(
        model, case.rank, None, case.loss_fn, x, y, clock=time.process_time
    )
    choice = planned.choices[case.choice]
    settle = updates_to_settle(case.batch_size, case.rank)
    filtered = _stepper(case, random, _options(choice))
    variants = [
        Variant(PLAIN, _stepper(case, random, None), num_steps=3),
        Variant("filtered", filtered, num_steps=4, num_warmup=settle),
    ]
    rounds = measure(variants, pace, tell, time.process_time)
    plain, whole = (seconds_of(rounds, variant.name) for variant in variants)
    added = spread([b - a for a, b in zip(plain, whole, strict=True)])
    return {
        "network": case.name,
        "basis": f"{choice.layout}, {choice.storage}",
        "rank": case.rank,
        "batch_size": case.batch_size,
        "num_parameters": planned.dim,
        "plain": spread(plain).median,
        "added": added.median,
        "added_low": added.low,
        "added_high": added.high,
        "predicted": choice.seconds,
        "off": choice.seconds / added.median - 1,
    }


def _options(choice: Any) -> dict[str, Any]:  # noqa: ANN401 (of a plan)
    if choice.direction_rank is not None:
        return {"layout": choice.layout, "direction_rank": choice.direction_rank}
    return {"layout": choice.layout, "basis_dtype": choice.basis_dtype}


def _built(case: Case) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.build()


def _stepper(
    case: Case, random: torch.Generator, options: dict[str, Any] | None
) -> Callable[[], None]:
    """Forward, backward and the filter, on another batch at each step."""
    model = _built(case)
    grad_filter = None
    if options is not None:
        grad_filter = dome.GradientFilter(model, case.rank, **options)

    def step() -> None:
        x, y = case.batch(random)
        model.zero_grad()
        case.loss_fn(model(x), y).backward()
        if grad_filter is not None:
            grad_filter.step()

    return step


def table(rows: list[Row]) -> TextTable:
    """What is added, what was predicted, and how far that is off."""
    lines = [
        [
            f"{row['network']}, {row['num_parameters']:,}",
            row["basis"],
            f"{row['rank']}",
            f"{row['batch_size']}",
            milliseconds(row["plain"]),
            milliseconds(row["added"]),
            milliseconds(row["predicted"]),
            f"{row['off']:+.0%}",
        ]
        for row in rows
    ]
    within = sum(abs(row["off"]) <= ALLOWED for row in rows)
    notes = [
        f"{within} of {len(rows)} within {ALLOWED:.0%}. Medians, one thread, seconds "
        f"of the process. The optimizer's own step is not in it."
    ]
    headings = ("parameters", "basis", "k", "B", "plain", "added", "plan", "off")
    return TextTable("What dome.plan predicts", headings, lines, notes)
