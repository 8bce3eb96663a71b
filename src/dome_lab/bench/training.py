"""The training loops that are measured: plain, filtered, and by the paper's recipe.

Inputs are random: what a step costs does not depend on what it learns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dome
from dome_lab.bench.paper_recipe import PaperRecipe
from dome_lab.paper.models import resnet8, resnet18

# Inputs that are repeated: many more than there are directions, or the samples would
# not determine the basis, which takes another, dearer path.
NUM_INPUTS = 1024
LEAST_BATCHES = 8
LEARNING_RATE = 0.01
MOMENTUM = 0.9
SEED = 0

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """A network and what it is given."""

    build: Callable[[int, int], nn.Module]
    image: tuple[int, int, int]
    num_classes: int


SETTINGS = {
    "resnet8": Setting(resnet8, (3, 32, 32), 10),
    "resnet8 on 8x8": Setting(resnet8, (3, 8, 8), 10),  # small enough for tests
    "resnet18": Setting(resnet18, (3, 64, 64), 200),
    # Where the images make no difference: bases and samples are as large.
    "resnet18 on 16x16": Setting(resnet18, (3, 16, 16), 200),
}


class Loop:
    """A training loop, one step at a time.

    Args:
        setting: Name in ``SETTINGS``.
        batch_size: Samples in a step.
        num_batches: Different batches to repeat; by default enough for any basis here.
        device: Where it trains.
    """

    def __init__(
        self,
        setting: str,
        batch_size: int,
        num_batches: int | None = None,
        device: str = "cpu",
    ) -> None:
        chosen = SETTINGS[setting]
        with torch.random.fork_rng(devices=[]):  # layers draw from the global generator
            torch.manual_seed(SEED)
            model = chosen.build(chosen.image[0], chosen.num_classes)
        self.model = model.to(device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        enough = max(LEAST_BATCHES, NUM_INPUTS // batch_size)
        self.batches = _batches(chosen, batch_size, num_batches or enough, device)

    @property
    def dim(self) -> int:
        """Number of parameters D."""
        return sum(p.numel() for p in self.model.parameters())

    def forward(self) -> Tensor:
        """Loss of the next batch."""
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        return cross_entropy(self.model(x), y)

    def step(self) -> None:
        """Forward, backward, and the optimizer with what is attached to it."""
        self.forward().backward()
        self.optimizer.step()


def _batches(
    setting: Setting, batch_size: int, num_batches: int, device: str
) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(SEED)
    shape = (batch_size, *setting.image)
    # A list: made on the way they would look like memory that steps take.
    return cycle(
        [
            (
                torch.randn(shape, generator=random).to(device),
                torch.randint(setting.num_classes, (batch_size,), generator=random).to(
                    device
                ),
            )
            for _ in range(num_batches)
        ]
    )


def filtered_loop(
    setting: str,
    batch_size: int,
    rank: int,
    device: str = "cpu",
    **options: Any,  # noqa: ANN401 (those of GradientFilter)
) -> Loop:
    """The plain loop and one line."""
    loop = Loop(setting, batch_size, device=device)
    dome.attach(loop.model, loop.optimizer, rank, **options)
    return loop


def attach_paper_recipe(loop: Loop, rank: int) -> None:
    """The paper's recipe on a plain loop; ``ModuleNotFoundError`` without Opacus."""
    recipe = PaperRecipe(loop.model, rank, torch.Generator().manual_seed(SEED))
    loop.model = recipe.model
    loop.optimizer.register_step_pre_hook(lambda *_: recipe.filter_())


def updates_to_settle(batch_size: int, rank: int) -> int:
    """Updates until the samples have determined the basis, and a few more.

    Before that an update takes another, dearer path: B − 1 directions come at a time.
    """
    return -(-rank // (batch_size - 1)) + 3
