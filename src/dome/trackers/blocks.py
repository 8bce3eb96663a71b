"""Several trackers that look like one: each has its own columns of the samples.

Shapes: G (B, D) samples, g (D,) a gradient. One block holds all D columns, or there is
one per layer; columns of no block are left alone.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dome import state as states
from dome.parameters import Block
from dome.torch_private import own_arithmetic
from dome.trackers.factors import FactorBatch
from dome.trackers.low_rank import LowRankPower
from dome.trackers.parts import PartialRows
from dome.trackers.protocol import PlannedTracker, Tracker, is_planned
from dome.trackers.tracker import update_all

Samples = Tensor | PartialRows | FactorBatch  # samples of a step, in three forms


class Blockwise:
    """A tracker for each block of the flat gradient.

    Args:
        by_name: The tracker of each block.
        columns: The columns of each block, among those that are held here.
    """

    def __init__(self, by_name: dict[str, Tracker], columns: Sequence[slice]) -> None:
        self.by_name, self._columns = by_name, tuple(columns)

    def __iter__(self) -> Iterator[tuple[slice, Tracker]]:
        return iter(zip(self._columns, self.by_name.values(), strict=True))

    @own_arithmetic
    def update(self, grads: Samples, scale: float = 1.0) -> None:
        """Fold the samples ``scale * grads``, shape (B, D), into every block."""
        ours: list[tuple[PlannedTracker, Samples]] = []
        for columns, tracker in self:
            own = within(grads, columns)
            if isinstance(own, FactorBatch) and not isinstance(tracker, LowRankPower):
                raise TypeError(f"{type(tracker).__name__} takes rows, not factors")
            if is_planned(tracker):
                ours.append((tracker, own))
            elif not isinstance(own, FactorBatch):
                rows = own if isinstance(own, Tensor) else own.written_out()
                tracker.update(rows, scale)
        update_all([t for t, _ in ours], [own for _, own in ours], scale)

    def update_block(self, name: str, grads: Tensor, scale: float = 1.0) -> None:
        """The same for one block alone, its columns of the samples (B, D of it)."""
        if name in self.by_name:
            self.by_name[name].update(grads, scale)

    @own_arithmetic
    def project_out(self, gradient: Tensor, strength: float = 1.0) -> Tensor:
        """g without ``strength`` times its part in each block's span, shape (D,)."""
        (first, tracker), *others = self
        if not others and first == slice(0, len(gradient)):
            return tracker.project_out(gradient, strength)
        filtered = gradient.clone()
        for columns, tracker in self:
            filtered[columns] = tracker.project_out(gradient[columns], strength)
        return filtered

    @own_arithmetic
    def project_out_(
        self, grads: Mapping[int, Tensor], strength: float | Tensor
    ) -> Tensor:
        """The same in place, where directions are of low rank.

        Args:
            grads: By the first column that a parameter has in the flat gradient.
            strength: Multiplies what is removed.

        Returns:
            The squared norm of what the gradient had in the spans.
        """
        inside = [
            directions(tracker).project_out_(
                {s - columns.start: g for s, g in grads.items() if s in within},
                strength,
            )
            for columns, tracker in self
            for within in (range(columns.start, columns.stop),)
        ]
        return torch.stack(inside).sum()

    def state_dict(self) -> dict[str, Tensor]:
        """The states of all trackers, by block."""
        state: dict[str, Tensor] = {}
        for name, tracker in self.by_name.items():
            state |= states.with_prefix(_prefix(name), tracker.state_dict())
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse other blocks, and what is no state of a block's tracker, by name."""
        below = states.below_prefix(states.BLOCK, state)
        saved = {entry.rpartition(".")[0]: None for entry in below}
        if saved.keys() != self.by_name.keys():
            raise ValueError(
                f"the checkpoint has bases for {states.short(saved)}, this filter for "
                f"{states.short(self.by_name)}: use the same layout and rank"
            )
        for name, tracker in self.by_name.items():
            if hasattr(tracker, "check_state"):
                try:
                    tracker.check_state(states.below_prefix(_prefix(name), state))
                except ValueError as error:
                    raise ValueError(
                        f"the basis of block {name!r} cannot be loaded: {error}"
                    ) from None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give every tracker its state back."""
        for name, tracker in self.by_name.items():
            tracker.load_state_dict(states.below_prefix(_prefix(name), state))


def directions(tracker: Tracker) -> LowRankPower:
    """A tracker that takes samples as factors."""
    if not isinstance(tracker, LowRankPower):
        raise TypeError(f"{type(tracker).__name__} takes rows, not factors")
    return tracker


def _prefix(name: str) -> str:
    return f"{states.BLOCK}{name}."


def ranks_of(blocks: Sequence[Block], rank: int | Mapping[str, int]) -> dict[str, int]:
    """Directions of each block that is tracked.

    Args:
        blocks: All there are.
        rank: Directions per block, or by block name; blocks not named are left out.
    """
    names = [block.name for block in blocks]
    if isinstance(rank, Mapping):
        unknown = sorted(set(rank) - set(names))
        if unknown or not rank:
            raise ValueError(
                f"rank names {unknown or 'no layer'}; the layers here are {names}"
            )
        return dict(rank)
    if len(names) == 1:
        return {names[0]: rank}
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    # A layer smaller than the rank is tracked whole.
    return {block.name: min(rank, block.dim) for block in blocks}


def within(grads: Samples, columns: slice) -> Samples:
    """The samples of some columns alone."""
    if isinstance(grads, Tensor):
        return grads[:, columns]
    return grads.within(columns)
