"""One forward and backward a sample: what captured samples are held against.

Shapes: rows (B, D), one sample a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.calls import LossCall, rebuilt
from dome.samples.capture import capture_paused
from dome.samples.tracing.inputs import Roles
from dome.samples.tracing.nested import Value, all_tensors


@dataclass(frozen=True, slots=True)
class Apart:
    """A call of a model that can be cut into one call for each sample.

    Attributes:
        whole: The call with the whole batch.
        num_samples: B, the length of the first tensor that holds samples.
        held: The ``id`` of every tensor that holds samples, if they are declared.
    """

    whole: LossCall
    num_samples: int
    held: frozenset[int] | None = None

    @classmethod
    def of(cls, call: LossCall, roles: Roles) -> "Apart":
        """By the first tensor, or by the inputs that were declared."""
        first = next(iter(all_tensors((call.args, call.kwargs))), None)
        if first is None or not first.ndim:
            raise ValueError(
                "the inputs have no tensor whose first dimension is samples"
            )
        if roles.declared is None:
            return cls(call, len(first))
        inputs = roles.named(call.args, call.kwargs)
        batch, places = roles.assigned(inputs, 0)
        held = frozenset(id(t) for name, t in inputs if name in places)
        return cls(call, batch, held)

    def one(self, b: int) -> LossCall:
        """Sample b alone: its entry of every tensor that holds B of them."""

        def own(t: Tensor) -> Tensor:
            if self.held is None:
                mine = bool(t.ndim) and len(t) == self.num_samples
            else:
                mine = id(t) in self.held
            num = len(t) // self.num_samples if mine else 0
            return t[num * b : num * (b + 1)] if mine else t

        args, kwargs = rebuilt((self.whole.args, self.whole.kwargs), own)
        return LossCall(args, kwargs, self.whole.loss_fn)


def shares(model: nn.Module, layout: Layout, batch: Apart) -> Tensor:
    """The gradient of each sample's share of a loss of the model's results.

    The loss is taken of the whole batch once; each sample is then run alone, and its
    results get the gradient that this loss has at them.
    """
    with capture_paused(model):
        with torch.no_grad():
            found = batch.whole.results(model)
        results = rebuilt(found, _as_leaf)
        leaves = {name: t for name, t in _by_name(results) if t.requires_grad}
        loss = batch.whole.loss_of(results)
        grads = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
        # Only what the loss depends on: a model may return a list of the samples.
        deltas = {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}
        rows = []
        for b in range(batch.num_samples):
            alone = dict(_by_name(batch.one(b).results(model)))
            total = torch.zeros((), device=layout.device)
            for name, delta in deltas.items():
                own = _entry(name, delta, alone.get(name), b, batch.num_samples)
                total = total + (alone[name] * own).sum()
            rows.append(_gradient(total, layout))
    return torch.stack(rows)


def weighted_losses(
    model: nn.Module, layout: Layout, batch: Apart, rows: Tensor
) -> tuple[Tensor, float]:
    """The gradients of the losses that a model returns, each as large as its row.

    A mean over words or boxes weighs samples by how many they have: the weight of each
    is taken from its row, one number for all parameters. The weights are held against
    the loss itself.

    Returns:
        Rows (B, D), and by what share the weighted losses miss the batch's.
    """
    literal, total = [], 0.0
    with capture_paused(model):
        whole = float(batch.whole.loss(model).detach())
        for b in range(batch.num_samples):
            loss = batch.one(b).loss(model)
            if not loss.isfinite():  # a mean over nothing: all of it is ignored
                literal.append(torch.zeros_like(rows[b]))
                continue
            own = _gradient(loss, layout)
            weight = float(rows[b] @ own / (own @ own)) if own.any() else 0.0
            total += weight * float(loss.detach())
            literal.append(weight * own)
    return torch.stack(literal), abs(total - whole) / max(abs(whole), 1e-30)


def _as_leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_() if t.is_floating_point() else t


def _by_name(value: Value, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested results, with the keys and places that lead to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _by_name(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for place, part in enumerate(value):
            yield from _by_name(part, f"{name}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _by_name(getattr(value, field.name), f"{name}.{field.name}")


def _entry(name: str, delta: Tensor, own: Tensor | None, b: int, batch: int) -> Tensor:
    """The part of δ (.., B, ..) that belongs to the results of sample b alone."""
    shape = None if own is None else own.shape
    for dim in range(delta.ndim):
        if delta.shape[dim] == batch and delta.narrow(dim, 0, 1).shape == shape:
            return delta.narrow(dim, b, 1)
    alone = "missing" if shape is None else tuple(shape)
    raise ValueError(
        f"the model's result{name} of shape {tuple(delta.shape)} is {alone} for one "
        f"sample alone: the loss must take results that hold the {batch} samples in "
        "one dimension"
    )


def _gradient(loss: Tensor, layout: Layout) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros(layout.dim, dtype=layout.dtype, device=layout.device)
    grads = torch.autograd.grad(loss, layout.parameters, allow_unused=True)
    pairs = zip(layout.parameters, grads, strict=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs]
    )
