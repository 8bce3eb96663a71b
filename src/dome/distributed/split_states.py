"""States of trackers whose rows are split over the workers of ``fully_shard``.

A state has three forms: what a worker holds; for ``torch.distributed.checkpoint`` with
DTensors, one for each parameter and cut as it is; and that of one process, whole.
Letters: K columns, n numbers that a worker holds.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dome import state as states
from dome.distributed.placement import Placement, local
from dome.numerics.factored import HELD
from dome.parameters import Block
from dome.trackers.blockwise import Blockwise, directions

State = dict[str, Tensor]


class SplitBases:
    """U, of which a worker holds some rows (n, K).

    Args:
        placement: What is held here.
        tracker: The trackers of the blocks.
    """

    def __init__(self, placement: Placement, tracker: Blockwise) -> None:
        self._placement, self._tracker = placement, tracker

    def for_checkpoint(self, block: Block) -> State:
        """A block's state with DTensors; nothing is gathered."""
        self._placement.gathers = False
        state = self._own(block)
        rows, Q = state.pop("basis"), state["Q"]
        parts = self._placement.split(rows, self._placement.members(block))
        # Of one shape, whether U is factored or not: a checkpoint is read into it.
        if not len(Q):
            state["Q"] = torch.eye(Q.shape[1], dtype=Q.dtype)
        return state | states.with_prefix("basis.", parts)

    def whole(self, block: Block) -> State:
        """A block's state in one process; on workers that do not gather it, less."""
        self._placement.gathers = True
        return self._own(block)

    def held(self, state: Mapping[str, Tensor], block: Block) -> State:
        """Of a block's state of any form, what is held here."""
        held = dict(state)
        parts = states.below_prefix("basis.", held)
        if not parts:
            return held
        for name in parts:
            del held[f"basis.{name}"]
        held[HELD] = self._placement.joined(parts, self._placement.members(block))
        Q = held["Q"]
        if torch.equal(Q, torch.eye(len(Q), dtype=Q.dtype, device=Q.device)):
            held["Q"] = Q[:0]
        return held

    def _own(self, block: Block) -> State:
        return self._tracker.by_name[block.name].state_dict()


class SplitDirections(SplitBases):
    """Directions of low rank: P and plain columns are split, Q is on every worker."""

    def for_checkpoint(self, block: Block) -> State:
        """A block's state with DTensors; nothing is gathered."""
        state = self._own(block)
        for name, chosen, by_row in self._split_entries(block):
            if by_row:
                state[name] = self._placement.cut_as(chosen[0], state[name])
            else:
                parts = self._placement.split(state.pop(name), chosen)
                state |= states.with_prefix(f"{name}.", parts)
        return state

    def whole(self, block: Block) -> State:
        """A block's state in one process; on workers that do not gather it, less."""
        state = self._own(block)
        for name, chosen, by_row in self._split_entries(block):
            state[name] = self._placement.collected(state[name], chosen, by_row)
        return state

    def held(self, state: Mapping[str, Tensor], block: Block) -> State:
        """Of a block's state of any form, what is held here."""
        held = dict(state)
        for name, chosen, by_row in self._split_entries(block):
            parts = states.below_prefix(f"{name}.", held)
            for part in parts:
                del held[f"{name}.{part}"]
            if parts:
                held[name] = self._placement.joined(parts, chosen)
            elif name not in held:
                continue  # of another tracker, which the tracker itself refuses
            elif by_row and hasattr(held[name], "to_local"):
                held[name] = local(held[name])
            elif by_row:
                held[name] = held[name][self._placement.rows_of(chosen[0])]
            elif chosen:
                held[name] = self._placement.held_of(held[name], chosen)
        return held

    def _split_entries(self, block: Block) -> list[tuple[str, list[int], bool]]:
        """Entries of a state, whose parameters they are, whether of rows of these."""
        members = self._placement.members(block)
        entries = directions(self._tracker.by_name[block.name]).entries_by_parameter()
        return [
            (name, [members[place] for place in places], name != "plain")
            for name, places in entries.items()
        ]
