"""States of trackers whose rows are split over the workers of ``fully_shard``.

A state has three forms: what a worker holds; for ``torch.distributed.checkpoint`` with
DTensors, one for each parameter and cut as it is; and that of one process, whole.
Letters: K columns, n numbers that a worker holds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dome import state as states
from dome.distributed.placement import Placement
from dome.masks import here
from dome.parameters import Block, Layout, Slot
from dome.trackers.basis import HELD
from dome.trackers.blocks import Blockwise
from dome.trackers.low_rank import LowRankPower
from dome.world import State


class StateEntry(NamedTuple):
    """An entry of a block's state that is split.

    Attributes:
        name: Its name.
        chosen: Whose rows it has, as places in the order of parameters.
        by_row: Whether it has one for a row of a parameter, or for a number.
    """

    name: str
    chosen: list[int]
    by_row: bool


class SplitStates:
    """Puts states of all blocks together and takes them apart.

    Of a basis U (n, K) is split. Of directions of low rank P and the plain columns are,
    and Q is on every worker.

    Args:
        layout: The parameters.
        placement: What is held here of them.
        tracker: The trackers of the blocks.
    """

    def __init__(
        self, layout: Layout, placement: Placement, tracker: Blockwise
    ) -> None:
        self._layout, self._placement, self._tracker = layout, placement, tracker

    def for_checkpoint(self) -> State:
        """With DTensors; nothing is gathered."""
        return self._each(self._tracker.state_dict(), self._as_dtensors)

    def whole(self, only: int | None) -> State:
        """As in one process; on workers that do not get it, less."""

        def collect(state: State, entry: StateEntry) -> None:
            held = state[entry.name]
            state[entry.name] = self._placement.collected(held, *entry[1:], only)

        return self._each(self._tracker.state_dict(), collect)

    def held(self, state: Mapping[str, Tensor]) -> State:
        """Of a state of any form, what is held here."""
        return self._each(state, self._held)

    def _each(
        self, state: Mapping[str, Tensor], change: Callable[[State, StateEntry], None]
    ) -> State:
        """A state whose split entries are changed, block by block."""
        changed = dict(state)
        for block in self._layout.blocks:
            if block.name not in self._tracker.by_name:
                continue
            prefix = f"{states.BLOCK}{block.name}."
            own = states.below_prefix(prefix, changed)
            for name in own:
                del changed[f"{prefix}{name}"]
            for entry in self._entries(block):
                change(own, entry)
            changed |= states.with_prefix(prefix, own)
        return changed

    def _entries(self, block: Block) -> list[StateEntry]:
        members = self._placement.members(block)
        tracker = self._tracker.by_name[block.name]
        if not isinstance(tracker, LowRankPower):
            return [StateEntry("basis", members, by_row=False)]
        return [
            StateEntry(name, [members[i] for i in places], by_row=name != "plain")
            for name, places in tracker.entries_by_parameter().items()
            if places
        ]

    def _as_dtensors(self, state: State, entry: StateEntry) -> None:
        name, chosen, by_row = entry
        if by_row:
            state[name] = self._dtensor(chosen[0], state[name])
            return
        rows = state.pop(name)
        held_here = [here(self._layout.parameters[i]) for i in chosen]
        parts = rows.split([p.numel() for p in held_here])
        for i, p, part in zip(chosen, held_here, parts, strict=True):
            held = part.reshape(*p.shape, rows.shape[1])
            state[f"{name}.{self._layout.slots[i].name}"] = self._dtensor(i, held)
        # Of one shape, whether U is factored or not: a checkpoint is read into it.
        if name == "basis" and not len(state["Q"]):
            state["Q"] = torch.eye(rows.shape[1], dtype=state["Q"].dtype)

    def _dtensor(self, i: int, held: Tensor) -> Tensor:
        """A tensor with the rows of a parameter, of which some are held, as DTensor."""
        from torch.distributed.tensor import DTensor  # slow to import

        p: Any = self._layout.parameters[i]
        shape = torch.Size((p.shape[0], *held.shape[1:]))
        whole: Tensor = DTensor.from_local(
            held.clone(),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return whole

    def _held(self, state: State, entry: StateEntry) -> None:
        name, chosen, by_row = entry
        slots = [self._layout.slots[i] for i in chosen]
        parts = [state.pop(f"{name}.{slot.name}", None) for slot in slots]
        found = [part for part in parts if part is not None]
        if not found and name != "basis" and name in state:
            found = [state[name]] if by_row else _cut(state[name], slots)
        if not found:
            return  # rows of U, which trackers take themselves, or another tracker's
        held = torch.cat(
            [self._own(*pair, by_row) for pair in zip(chosen, found, strict=True)]
        )
        if name != "basis":
            state[name] = held
            return
        state[HELD], Q = held, state["Q"]
        if torch.equal(Q, torch.eye(len(Q), dtype=Q.dtype, device=Q.device)):
            state["Q"] = Q[:0]

    def _own(self, i: int, part: Tensor, by_row: bool) -> Tensor:
        """Of rows of a parameter, whole or a DTensor, those held here."""
        rows = here(part) if by_row else here(part).reshape(-1, part.shape[-1])
        is_cut = hasattr(part, "to_local")
        return rows if is_cut else rows[self._placement.part(i, by_row)]


def _cut(rows: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """The rows (D, K) of some parameters, parameter by parameter."""
    parts, start = [], 0
    for slot in slots:
        stop = start + slot.stop - slot.start
        parts.append(rows[start:stop])
        start = stop
    return parts
