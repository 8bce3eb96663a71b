"""A model's gradients as one vector, and the blocks of it that get a basis each.

Global layout: one block that holds every parameter. Layer-wise layout: one block for
each module that owns parameters. Either way parameters lie one after the other in
``model.parameters()`` order, so a block is a range of columns of the samples (B, D).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce

import torch
from torch import Tensor, nn

from dome.torch_private import copy_all_, flattened, unflattened


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in the flat gradient: columns ``start`` to ``stop``."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Block:
    """A range of columns that is tracked by a basis of its own."""

    name: str
    start: int
    stop: int

    @property
    def dim(self) -> int:
        """Number of parameters in the block."""
        return self.stop - self.start


class Layout:
    """Names, order and blocks of the parameters whose gradients are filtered.

    Args:
        model: Its trainable parameters are taken, shared ones once; those that hold no
            number, as of ``nn.Linear(8, 0)``, have no gradient to filter.
        kind: "global" or "layerwise".
        only: Take just the parameters that are also among these (an optimizer's).
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "global",
        only: Iterable[Tensor] | None = None,
    ) -> None:
        if kind not in LAYOUTS:
            raise ValueError(f"layout must be one of {tuple(LAYOUTS)}, got {kind!r}")
        check_model(model)
        allowed = None if only is None else {id(p) for p in only}
        named = [
            (name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and (allowed is None or id(p) in allowed)
            if has_numbers(p)
        ]
        if not named:
            where = "model" if only is None else "model that the optimizer also holds"
            raise ValueError(
                f"no trainable parameter in the {where}: nothing to filter"
            )
        for name, p in named:
            if is_lazy(p):
                raise ValueError(
                    f"parameter {name!r} has no shape yet: run one batch through the "
                    f"lazy modules first"
                )
            if p.is_complex():
                raise ValueError(
                    f"parameter {name!r} is complex ({p.dtype}): dome filters real "
                    f"gradients; keep its parts as real parameters and join them with "
                    f"torch.complex, or leave it out (parameters=...)"
                )
        self.parameters: tuple[nn.Parameter, ...] = tuple(p for _, p in named)
        self.slots: tuple[Slot, ...] = _slots(named)
        self.dim = self.slots[-1].stop
        self.blocks = LAYOUTS[kind](self.slots)
        self.slot_of: dict[int, Slot] = {
            id(p): slot for p, slot in zip(self.parameters, self.slots, strict=True)
        }

        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise ValueError(
                f"parameters lie on {sorted(map(str, devices))}: one basis lives on "
                f"one device, move the model to a single one"
            )
        self.device = self.parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the flat gradient, at least float32."""
        return torch.promote_types(torch.float32, self.common_dtype)

    @property
    def common_dtype(self) -> torch.dtype:
        """The precision that holds all parameters as they are."""
        return reduce(torch.promote_types, {p.dtype for p in self.parameters})

    def gather(self) -> Tensor:
        """The gradient in ``.grad`` as one vector (D,); a missing one is zero.

        A sparse one is made dense: filtered, it has numbers in every row.
        """
        grads = self._grads()
        try:
            flat = flattened(grads)
        except RuntimeError:
            for p in self.parameters:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
            grads = self._grads()
            self._check(grads)
            flat = flattened(grads)
        if flat.device != self.device:
            self._check(grads)
        # Of a single tensor it is a view.
        return flat.clone() if len(grads) == 1 else flat

    def _grads(self) -> list[Tensor]:
        return [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters
        ]

    def dense_grads(self, dtype: torch.dtype) -> dict[int, Tensor] | None:
        """What is in ``.grad``, by first column; None where it must be gathered.

        That is, of another precision than asked for, or another device or layout than
        the flat gradient.
        """
        grads: dict[int, Tensor] = {}
        device = self.device
        for p, slot in zip(self.parameters, self.slots, strict=True):
            g = p.grad
            if g is None:
                continue
            if g.dtype != dtype or g.device != device or g.is_sparse:
                return None
            grads[slot.start] = g
        return grads or None

    def shapes(self, block: Block) -> list[torch.Size]:
        """The shapes of the parameters in a block, in order."""
        return [s.shape for s in self.slots if block.start <= s.start < block.stop]

    def _check(self, grads: list[Tensor]) -> None:
        """Refuse gradients that are on another device."""
        for gradient, slot in zip(grads, self.slots, strict=True):
            if gradient.device != self.device:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is on {gradient.device}, the basis "
                    f"on {self.device}: move the model first, then attach"
                )

    def scatter_(self, vector: Tensor) -> None:
        """Write a flat gradient (D,) into ``.grad``, where there is one."""
        there = [p for p in self.parameters if p.grad is not None]
        pieces = unflattened(vector, self.parameters)
        if len(there) < len(pieces):
            pairs = zip(self.parameters, pieces, strict=True)
            pieces = [piece for p, piece in pairs if p.grad is not None]
        if there:
            # One call for all: a call a parameter costs more than what it copies.
            copy_all_([p.grad for p in there if p.grad is not None], pieces)


def is_lazy(p: Tensor) -> bool:
    """Whether a parameter has no shape before the first batch."""
    return isinstance(p, nn.parameter.UninitializedParameter)


def has_numbers(p: Tensor) -> bool:
    """Whether a parameter holds, or will hold, any number."""
    return is_lazy(p) or p.numel() > 0


def selected(
    model: nn.Module,
    wanted: Iterable[Tensor | str] | str | None,
    among: Iterable[Tensor] | None = None,
) -> tuple[list[Tensor] | None, list[str] | None]:
    """The parameters that were asked for, and the patterns among what was given.

    Args:
        model: Whose trainable parameters they are.
        wanted: Tensors, names, or patterns of names such as "encoder.*"; all, if None.
        among: Leave out what is not among these (an optimizer's).
    """
    check_model(model)
    if wanted is None:
        return None, None
    if isinstance(wanted, str):
        wanted = [wanted]
    if isinstance(wanted, Tensor) or not isinstance(wanted, Iterable):
        raise ValueError(
            f"parameters must be a list of tensors, names or patterns of names such as "
            f"'encoder.*', got {kind_of(wanted)}"
        )
    wanted = list(wanted)
    patterns = [p for p in wanted if isinstance(p, str)]
    tensors = {id(p) for p in wanted if not isinstance(p, str)}
    allowed = None if among is None else {id(p) for p in among}
    # By any of its names, where a parameter is shared.
    named = [
        (name, p)
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad and (allowed is None or id(p) in allowed)
    ]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name, _ in named):
            listed = ", ".join(repr(name) for name, _ in named[:5])
            raise ValueError(
                f"no parameter that would be filtered is called {pattern!r}: there are "
                f"{len(named)}, the first {listed}"
            )
    found: list[Tensor] = [
        p for name, p in named if id(p) in tensors or matches(name, patterns)
    ]
    return found, patterns


def check_model(model: object) -> None:
    """Refuse what is no module; two arguments may have been swapped."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {kind_of(model)}")


def kind_of(value: object) -> str:
    """What was given: the name of its type, or the class itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these, or fits a pattern such as "encoder.*"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _slots(named: list[tuple[str, nn.Parameter]]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, p in named:
        slots.append(Slot(name, p.shape, start, start + p.numel()))
        start += p.numel()
    return tuple(slots)


def _layers(slots: tuple[Slot, ...]) -> tuple[Block, ...]:
    """One block per module: neighbours whose names differ in the last part only."""
    blocks: list[Block] = []
    for slot in slots:
        module = slot.name.rpartition(".")[0] or slot.name
        if blocks and blocks[-1].name == module:
            blocks[-1] = Block(module, blocks[-1].start, slot.stop)
        else:
            blocks.append(Block(module, slot.start, slot.stop))
    return tuple(blocks)


def _one_block(slots: tuple[Slot, ...]) -> tuple[Block, ...]:
    """All parameters together."""
    return (Block("all", 0, slots[-1].stop),)


# How the flat gradient is cut into blocks that get a basis each.
LAYOUTS: dict[str, Callable[[tuple[Slot, ...]], tuple[Block, ...]]] = {
    "global": _one_block,
    "layerwise": _layers,
}
