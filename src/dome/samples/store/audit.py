"""Do the rows of a parameter account for all of its gradient?

A shared weight may be captured in some of its uses only. So now and then, what
autograd delivers for a parameter is compared with the sum of the rows that this very
backward pass left: before ``.grad`` is touched, so that accumulation, a loss scale,
clipping and hooks of the user's make no difference. The numbers stay on the device
until samples are taken; what they mean is said in ``verdict.py``.

Letters, for one parameter p of one backward pass: g its gradient, R (B, n) its rows,
r = g − Σ_b R_b, s = sign(p).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome.parameters import Layout, Slot
from dome.samples.store.group import AnyGroup
from dome.samples.store.verdict import Finding
from dome.samples.store.wanted import Leaves, Reach
from dome.torch_private import (
    current_graph_task,
    float32_products,
    hook_first,
    own_arithmetic,
)

# Relative to the rows of the parameter, and to those of all parameters. Rows and
# gradient are the same numbers summed in another order; products of float32 numbers may
# keep ten bits of 24 (TF32, on GPUs) or eight (float32_matmul_precision "medium").
# Where a gradient vanishes exactly (keys' biases), all of it is rounding.
_LIMITS = {
    torch.float64: (1e-6, 1e-10),
    torch.float32: (1e-4, 1e-6),
    torch.bfloat16: (5e-2, 1e-2),
    torch.float16: (5e-2, 1e-2),
}
_LIMITS_TF32 = (5e-3, 1e-4)

# Numbers at a time: of a large embedding, three copies in float64 would be the largest
# thing there is.
PIECE = 1 << 22

# The first step, and then every so many. An audited step of a ResNet-8 or a small
# transformer takes 11 to 50 % longer (128 and 16 samples), which is half a per cent in
# the long run at most.
_EVERY = 100


def products(
    p: nn.Parameter, grad: Tensor, parts: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Products of r, p and s, |g|² and |R|²: all that a verdict needs, shape (8,).

    They stay on the device.

    Args:
        p: The parameter.
        grad: g, in the shape of p.
        parts: Of its rows, for each batch size: their sum, in the shape of p, and
            their length.
    """
    kind = torch.promote_types(p.dtype, torch.float32)
    g, w = grad.detach().to(kind), p.detach().to(kind)
    r, of_rows = g, torch.zeros((), dtype=_wide(p.device), device=p.device)
    for total, length in parts:
        r = r - total
        of_rows = of_rows + length.to(of_rows.dtype).square()
    pieces = zip(*(t.flatten().split(PIECE) for t in (r, w, g)), strict=True)
    sums = torch.stack([_sums(*piece) for piece in pieces]).sum(0)
    return torch.cat([sums, of_rows[None]])


def _sums(r: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Products of r, w and the signs of w, and |g|², shape (7,)."""
    # In float32 the remainder of a fit would keep half of its digits, and the squares
    # of small numbers would be zero.
    r, w, g = (t.to(_wide(t.device)) for t in (r, w, g))
    s = w.sign()
    pairs = ((r, r), (r, w), (r, s), (w, w), (w, s), (s, s), (g, g))
    return torch.stack([(a * b).sum() for a, b in pairs])


def _wide(device: torch.device) -> torch.dtype:
    """The widest type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, slots=True)
class Entry:
    """What was found out about one parameter, its numbers still on the device."""

    slot: Slot
    task: int
    has_rows: bool
    limits: tuple[float, float]
    products: Tensor

    def finding(self, numbers: Sequence[float]) -> Finding:
        """The same with the numbers read."""
        num = self.slot.stop - self.slot.start
        return Finding(self.slot.name, num, self.has_rows, self.limits, *numbers)


class Audit:
    """Listens to the gradients of parameters on the steps that are looked into.

    Args:
        layout: The parameters.
        groups: The groups of rows that the running backward pass has left so far.
    """

    def __init__(
        self, layout: Layout, groups: Callable[[], Sequence[AnyGroup]]
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._leaves = Leaves()
        self._steps_left = 0
        self._handles: list[RemovableHandle] = []
        self._entries: list[Entry] = []

    def begin(self) -> None:
        """Listen from this forward pass on, if it is time again."""
        if self._steps_left or self._handles:
            return
        for p, slot in zip(self._layout.parameters, self._layout.slots, strict=True):
            if p.requires_grad:
                self._handles.append(hook_first(p, self._listener(p, slot)))

    def end_step(self) -> list[Entry]:
        """Hand over what was found at this step, parameter by parameter."""
        self._steps_left = _EVERY if self._handles else max(self._steps_left - 1, 0)
        entries = sorted(self._entries, key=lambda entry: entry.slot.start)
        self.stop()
        return entries

    def stop(self) -> None:
        """Stop listening, and forget what was found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entries.clear()

    def _listener(self, p: nn.Parameter, slot: Slot) -> Callable[[Tensor], None]:
        def listen(grad: Tensor) -> None:
            # Not of autograd.grad(), which leaves no rows.
            if self._leaves.reach(p) is Reach.FILLS and not grad.is_sparse:
                self._entries.append(entry(p, slot, grad, self._groups()))

        return listen


@own_arithmetic
def entry(
    p: nn.Parameter, slot: Slot, grad: Tensor, groups: Sequence[AnyGroup]
) -> Entry:
    """A gradient against the rows that a backward pass left."""
    own = [group for group in groups if slot.start in group.written]
    dtypes = [p.dtype, *(group.dtype_of(slot) for group in own)]
    kind = torch.promote_types(p.dtype, torch.float32)
    parts = [group.parts(slot, kind) for group in own]
    limits = _limits_for(dtypes, p.device)
    task, found = current_graph_task(), products(p, grad, parts)
    return Entry(slot, task, bool(own), limits, found)


def _limits_for(
    dtypes: Iterable[torch.dtype], device: torch.device
) -> tuple[float, float]:
    """What rounding explains where products were taken in these types."""
    dtypes = set(dtypes)
    limits = [_LIMITS[dtype] for dtype in dtypes]
    if torch.float32 in dtypes:
        kept = float32_products(device.type)
        if kept is torch.bfloat16:
            limits.append(_LIMITS[kept])
        elif kept is torch.float16 or device.type == "cuda":
            limits.append(_LIMITS_TF32)
    own, of_all = zip(*limits, strict=True)
    return max(own), max(of_all)
