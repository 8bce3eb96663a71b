"""Memory that several tensors share: who writes to one writes to all of them.

A view, a slice, ``detach()`` and ``.data`` lie in the memory of another tensor. A write
that moves or mixes samples is kept here, by storage. Whatever is asked for later in the
same storage and was looked at before the write is looked at again: no list of views is
needed, and none can be forgotten.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dome.samples.tracing.axis import NOBODY, Axis, Labels
from dome.samples.tracing.origins import Batched, Derived, Origin
from dome.torch_private import StorageRef, storage_key

_HIDDEN = "a write to memory that it shares"


class Window(NamedTuple):
    """The part of a storage that a tensor shows, in entries."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int

    @classmethod
    def of(cls, t: Tensor) -> "Window":
        """The part that ``t`` shows."""
        return cls(tuple(t.shape), t.stride(), int(t.storage_offset()), t.itemsize)

    @property
    def end(self) -> int:
        """Behind its last entry."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((n - 1) * s for n, s in steps)

    def through(self, memory: Tensor, start: int) -> Tensor:
        """The same part of memory whose first entry is number ``start``."""
        return memory.as_strided(self.shape, self.stride, self.offset - start)


class Write(NamedTuple):
    """A write that put, moved or mixed samples: where, when, what is there since."""

    window: Window
    time: int
    origin: Origin
    ids: Tensor | None


class Memory:
    """The writes of a forward pass that put, moved or mixed samples, by storage."""

    def __init__(self) -> None:
        self.time = 0
        # A storage that is gone keeps its key as long as it is referred to here.
        self.writes: dict[int, tuple[StorageRef, tuple[Write, ...]]] = {}

    def note(self, t: Tensor, origin: Origin) -> None:
        """Remember that ``t`` was written to, and what is known of it since."""
        key = storage_key(t)
        if key is None:
            return
        self.time += 1
        place = origin.place if isinstance(origin, Batched) else None
        ids = None if place is None else place.labels(t).ids
        write = Write(Window.of(t), self.time, origin, ids)
        ref, earlier = self.writes.get(key) or (StorageRef(t.untyped_storage()), ())
        self.writes[key] = ref, (*earlier, write)

    def since(self, t: Tensor, time: int) -> list[Write]:
        """Writes to the memory of ``t`` after this time, in turn."""
        found = self.writes.get(storage_key(t) or 0)
        return [] if found is None else [w for w in found[1] if w.time > time]

    def copied(self) -> "Memory":
        """The same for a pass that continues from here on its own."""
        twin = Memory()
        twin.time, twin.writes = self.time, dict(self.writes)
        return twin

    def forget(self) -> None:
        """Begin another forward pass. Time goes on: tensors may have been kept."""
        self.writes.clear()


def seen_after(write: Write, t: Tensor, before: Origin | None) -> Origin | None:
    """What is known of a tensor after a write through another one in its memory."""
    window, origin = Window.of(t), write.origin
    if not _overlap(write.window, window):
        return before
    if isinstance(origin, Derived):
        if isinstance(before, Batched):
            return Batched(None, hidden=_HIDDEN)
        earlier = () if before is None else before.sources
        return Derived(tuple(dict.fromkeys((*earlier, *origin.sources))))
    if not isinstance(before, Batched):
        return _of_parts(write, origin, t)
    found = Batched(before.place, hidden=_HIDDEN)
    if before.place is not None and write.ids is not None and _alike(write, window):
        own, held = _seen(write, write.ids, window), before.place.labels(t).ids
        found = Batched(before.place, doubt=((own != held) & (own >= 0)).any())
    inputs = origin.inputs | before.inputs
    return replace(found.joined(before).joined(origin), inputs=inputs)


def _of_parts(write: Write, origin: Batched, t: Tensor) -> Batched:
    """What is known of what held no samples, and holds some since this write."""
    window, place = Window.of(t), origin.place
    found = Batched(None, hidden=_HIDDEN)
    if place is not None and write.ids is not None and _alike(write, window):
        own = _seen(write, write.ids, window)
        axis, doubt = _regular(t, place.batch, own)
        found = Batched(axis or Labels(own.clone(), place.batch), doubt=doubt)
    return replace(found.joined(origin), inputs=origin.inputs)


def _alike(write: Write, window: Window) -> bool:
    """Whether both count the entries of their memory alike: a type of another size."""
    return write.window.itemsize == window.itemsize


def _seen(write: Write, ids: Tensor, window: Window) -> Tensor:
    """What was written, by number, seen through another part of the memory."""
    start = min(write.window.offset, window.offset)
    end = max(write.window.end, window.end)
    memory = torch.full((end - start,), NOBODY, device=ids.device)
    write.window.through(memory, start).copy_(ids)
    return window.through(memory, start)


def _regular(t: Tensor, batch: int, ids: Tensor) -> tuple[Axis | None, Tensor | None]:
    """The dimension along which these ids count the samples; whether it is not."""
    dims = [dim for dim, size in enumerate(t.shape) if size == batch]
    for dim in dims:
        axis = Axis(dim, batch)
        doubt = ((ids != axis.labels(t).ids) & (ids >= 0)).any()
        # Elsewhere than on the CPU an answer waits for all work before it.
        if not ids.is_cpu and len(dims) == 1:
            return axis, doubt
        if ids.is_cpu and not doubt:
            return axis, None
    return None, None


@lru_cache(maxsize=1000)
def _overlap(one: Window, other: Window) -> bool:
    """Whether two parts of a storage have an entry in common."""
    if one.itemsize != other.itemsize:
        first, last = sorted((one, other), key=lambda w: w.offset * w.itemsize)
        return last.offset * last.itemsize < first.end * first.itemsize
    start, end = max(one.offset, other.offset), max(one.end, other.end)
    if start >= min(one.end, other.end):
        return False
    start = min(one.offset, other.offset)
    touched = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    one.through(touched, start).fill_(True)
    return bool(other.through(touched, start).any())
