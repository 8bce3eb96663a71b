"""Do the rows of a parameter account for all of its gradient?

A shared weight may be captured in some of its uses only. So now and then, what
autograd delivers for a parameter is compared with the sum of the rows that this very
backward pass left: before ``.grad`` is touched, so that accumulation, a loss scale,
clipping and hooks of the user's make no difference. The numbers stay on the device
until samples are taken.

Letters, for one parameter p of one backward pass: g its gradient, R (B, n) its rows,
r = g − Σ_b R_b what they leave, s = sign(p). A penalty on the weights in the loss is no
sample's: r = λ p for an L2 penalty, λ s for an L1 penalty, or a sum of both. Any other
remainder is a use of the parameter that was not captured.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dome.parameters import Layout, Slot
from dome.samples.store.gradients import Leaves, Reach
from dome.torch_private import (
    current_graph_task,
    float32_products,
    hook_first,
    own_arithmetic,
)

# Limits, relative to the rows of the parameter and to those of all. Rows and
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

# Of fewer numbers, a remainder along p proves nothing: it always is.
FEWEST = 3
# The same for a remainder in the span of p and sign(p).
_FEWEST_FOR_BOTH = 9


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
class Finding:
    """The products of one parameter in one backward pass, on the host.

    Attributes:
        name: The parameter.
        num: n, how many numbers it has.
        has_rows: Whether any sample was captured.
        limits: What rounding explains: of its own size, and of all parameters'.
        rr: |r|², and so on.
        rw: With the parameter.
        rs: With its signs.
        ww: Of the parameter with itself.
        ws: With its signs.
        ss: Of the signs with themselves.
        gg: |g|².
        of_rows: |R|², 0 without any.
    """

    name: str
    num: int
    has_rows: bool
    limits: tuple[float, float]
    rr: float
    rw: float
    rs: float
    ww: float
    ws: float
    ss: float
    gg: float
    of_rows: float

    @property
    def size(self) -> float:
        """What r is measured by: sums of rows may cancel, and rounding does not."""
        return self.gg + self.of_rows

    def remainder(self, l2: float, l1: float) -> float:
        """|r − l2 p − l1 s|, what such a penalty leaves unexplained."""
        squared = self.rr - 2 * (l2 * self.rw + l1 * self.rs)
        squared += l2 * l2 * self.ww + 2 * l1 * l2 * self.ws + l1 * l1 * self.ss
        return sqrt(max(squared, 0.0))

    def penalties(self) -> list[tuple[float, float]]:
        """The coefficients of p and s that explain most: one, the other, both."""
        if self.num < FEWEST or self.ww == 0:
            return []
        fits = [(self.rw / self.ww, 0.0), (0.0, self.rs / self.ss)]
        determinant = self.ww * self.ss - self.ws**2
        # Weights of one size, as norms have at the start, leave nothing to tell apart.
        if self.num >= _FEWEST_FOR_BOTH and determinant > 1e-6 * self.ww * self.ss:
            l2 = (self.ss * self.rw - self.ws * self.rs) / determinant
            l1 = (self.ww * self.rs - self.ws * self.rw) / determinant
            fits.append((l2, l1))
        return fits


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


class Audited(Protocol):
    """The samples of one backward pass and one batch size, as an audit sees them."""

    written: set[int]

    def parts(self, slot: Slot, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """The sum of a parameter's samples, and what rounding is measured by."""

    def dtype_of(self, slot: Slot) -> torch.dtype:
        """The coarsest type in which a parameter's samples were computed."""


class Audit:
    """Listens to the gradients of parameters on the steps that are looked into.

    Args:
        layout: The parameters.
        groups: The samples that the running backward pass has left so far.

    Attributes:
        is_listening: Whether this step is looked into.
        steps_left: How many steps are not before the next one that is; their taker
            counts them down.
    """

    def __init__(self, layout: Layout, groups: Callable[[], Sequence[Audited]]) -> None:
        self.is_listening, self.steps_left = False, 0
        self._layout = layout
        self._groups = groups
        self._leaves = Leaves(layout.parameters)
        self._handles: list[RemovableHandle] = []
        self._entries: list[Entry] = []

    def begin(self) -> None:
        """Listen from this forward pass on."""
        if self.is_listening:
            return
        self.is_listening = True
        for p, slot in zip(self._layout.parameters, self._layout.slots, strict=True):
            if p.requires_grad:
                self._handles.append(hook_first(p, self._listener(p, slot)))

    def end_step(self) -> list[Entry]:
        """Hand over what was found at this step, parameter by parameter."""
        entries = sorted(self._entries, key=lambda entry: entry.slot.start)
        self.stop()
        self.steps_left = _EVERY
        return entries

    def stop(self) -> None:
        """Stop listening, and forget what was found."""
        self.is_listening = False
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
    p: nn.Parameter, slot: Slot, grad: Tensor, groups: Sequence[Audited]
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


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """The parameters whose rows miss a part that is no penalty's."""
    total = sum(f.size for f in findings)
    if not isfinite(total):
        return []  # a loss that is not finite is another matter
    everything = sqrt(total)
    suspects = [f for f in findings if _limit(f, everything) < sqrt(f.rr)]
    # Small parameters believe in the penalty of larger ones.
    known = [
        fit
        for f in suspects
        for fit in f.penalties()
        if f.remainder(*fit) <= _limit(f, everything)
    ]
    return [
        f
        for f in suspects
        if all(
            f.remainder(*fit) > _limit(f, everything)
            for fit in ((0.0, 0.0), *f.penalties(), *known)
        )
    ]


def check_complete(findings: Sequence[Finding]) -> None:
    """Raise ``RuntimeError`` for a parameter whose rows miss a part of its gradient."""
    for finding in unexplained(findings):
        if not finding.has_rows:
            raise RuntimeError(
                f"parameter {finding.name!r} has a gradient that no captured sample "
                "accounts for: it was used outside model(...) or inside a "
                "torch.autograd.Function, or .grad was set by hand. Call the model "
                "itself, give the function a rule with dome.sample_rule, or use "
                'samples="microbatch"'
            )
        raise RuntimeError(
            f"the captured samples of parameter {finding.name!r} miss a part of its "
            f"gradient ({_share(finding):.0%} of it): it is used once more outside "
            "model(...) or inside a torch.autograd.Function. Call the model itself, "
            "put the step into `with grad_filter.watch(inputs):`, give the function a "
            "rule with dome.sample_rule, or use "
            'samples="microbatch"; if this is a penalty on the weights, pass '
            "ignore_penalty=True"
        )


def _share(finding: Finding) -> float:
    return sqrt(finding.rr / finding.gg) if finding.gg else 1.0


def _limit(finding: Finding, everything: float) -> float:
    own, of_all = finding.limits
    if not finding.has_rows:
        return own * sqrt(finding.size)
    return max(own * sqrt(finding.size), of_all * everything)
