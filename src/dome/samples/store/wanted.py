"""Who takes the samples of which parameter, for one forward pass of a model.

One capture feeds all takers of a model: an operation runs once, its per-sample
gradients are made once, and each taker gets those of its own parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dome.numerics.factors import Product
from dome.parameters import Layout
from dome.samples.store.backward import Leaves, Reach, current_backward


class Taker(Protocol):
    """Collects the samples of some of a model's parameters, in one of two forms.

    As rows: ``room`` and ``put`` get gradients (B, *parameter), which the taker keeps
    side by side in one matrix (B, D). This is what ``Rows`` does, and all that the
    trackers of today need.

    As factors: a rule has δ (B, T, out) and a (B, T, in) in its hands just before it
    multiplies them. It offers them to ``keep`` first, see ``dome.numerics.factors``; a
    taker that keeps these two never sees rows. If several take samples of a parameter,
    rows are made for all.
    """

    layout: Layout
    active: bool

    def begin(self, num_samples: int) -> None:
        """A forward pass of so many samples starts."""

    def records(self, reach: Reach) -> bool:
        """Whether a backward pass that does this about a parameter leaves samples."""

    def room(
        self, source: "Pass", p: nn.Parameter, dtype: torch.dtype, zero: bool
    ) -> Tensor | None:
        """Space (B, *parameter) for a rule to write into, None if there is none."""

    def keep(self, source: "Pass", p: nn.Parameter, product: Product) -> bool:
        """Whether samples are taken as a product; if not, they come as rows."""

    def put(
        self, source: "Pass", p: nn.Parameter, grads: Tensor, dtype: torch.dtype
    ) -> None:
        """Add per-sample gradients (B, *parameter), which were computed in a type."""


class Wanted:
    """The parameters whose samples are wanted, by whom, and what they are called.

    Made anew when takers come, go or rest; a graph keeps feeding those it was built
    for.

    Args:
        takers: At least one. A parameter may have several.
    """

    def __init__(self, takers: Sequence[Taker]) -> None:
        self.takers = tuple(takers)
        self._takers_of: dict[int, tuple[Taker, ...]] = {}
        self._names: dict[int, str] = {}
        parameters: dict[int, nn.Parameter] = {}
        for taker in takers:
            layout = taker.layout
            for p, slot in zip(layout.parameters, layout.slots, strict=True):
                parameters[id(p)] = p
                self._names[id(p)] = slot.name
                self._takers_of[id(p)] = (*self._takers_of.get(id(p), ()), taker)
        self.parameters = tuple(parameters.values())
        self._leaves = Leaves()
        # What was asked about the backward pass of this number already.
        self._asked = -1
        self._reach: dict[int, Reach] = {}
        self._recording: dict[int, tuple[Taker, ...]] = {}

    def __contains__(self, p: nn.Parameter) -> bool:
        return id(p) in self._takers_of

    def name(self, p: nn.Parameter) -> str:
        """The parameter as the user calls it."""
        return self._names[id(p)]

    def computes(self, p: nn.Parameter) -> bool:
        """Whether the running backward pass needs the gradient of a parameter."""
        return self._reach_of(p) > Reach.NOTHING

    def recording(self, p: nn.Parameter) -> tuple[Taker, ...]:
        """Who takes samples of a parameter from the running backward pass."""
        reach = self._reach_of(p)
        found = self._recording.get(id(p))
        if found is None:
            takers = self._takers_of[id(p)]
            # A list, not a generator: this is asked for every weight.
            found = tuple([taker for taker in takers if taker.records(reach)])
            self._recording[id(p)] = found
        return found

    def _reach_of(self, p: nn.Parameter) -> Reach:
        task = current_backward()
        if task != self._asked:
            self._asked, self._reach, self._recording = task, {}, {}
        found = self._reach.get(id(p))
        if found is None:
            found = self._reach[id(p)] = self._leaves.reach(p)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass.

    Attributes:
        batch: B, the number of its samples.
        wanted: Who takes them.
    """

    batch: int
    wanted: Wanted
