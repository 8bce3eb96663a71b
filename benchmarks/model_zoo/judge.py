"""One model of the zoo: are its captured rows those of one backward a sample?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples import PerSample

# Whatever other people's models take and return.
Value = Any

# Two ways to sum the same numbers, relative to the largest entry of the parameter.
BATCH = 3
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class Case:
    """A model and one batch for it.

    Attributes:
        model: Built from a small random configuration.
        inputs: What it is called with, by name.
        split: The inputs of sample b alone; by the first dimension if not given.
        dtype: float32 only where torch has no float64 kernel.
        batch: How many samples.
        allowed: Deviation that rounding explains, if not that of the type.
    """

    model: nn.Module
    inputs: dict[str, Any]
    split: Callable[[dict[str, Any], int], dict[str, Any]] | None = None
    dtype: torch.dtype = torch.float64
    batch: int = BATCH
    allowed: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What the zoo found of one model."""

    library: str
    name: str
    result: str
    reason: str = ""
    error: float | None = None


# What to try where a model as it is cannot be captured, as the table says it.
OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "": (False, {}),
    "`.eval()` on its batch norms": (True, {}),
    "`allow_mixing=True`": (False, {"allow_mixing": True}),
}


def judge(library: str, name: str, make: Callable[[], Case]) -> Verdict:
    """Compare the rows of one model with one backward a sample."""
    torch.manual_seed(0)
    case = make()
    model = _prepared(case)
    refusal = ""
    for option, (frozen, keywords) in OPTIONS.items():
        if frozen:
            _freeze_norms(model)
        _loss(model(**_typed(case.inputs, case.dtype)))  # a failure of its own is none
        try:
            rows = _captured(model, case, **keywords)
        except (RuntimeError, ValueError) as error:
            refusal = refusal or str(error)
            continue
        literal = _one_backward_a_sample(model, case)
        error = _largest_error(model, literal, rows)
        exact = error <= (case.allowed or ALLOWED[case.dtype])
        if keywords and not exact:
            break  # who allows mixing must know; here it would be wrong
        result = ("exact" if not option else f"with {option}") if exact else "wrong"
        return Verdict(library, name, result, refusal, error)
    return Verdict(library, name, "refused", refusal)


def _prepared(case: Case) -> nn.Module:
    """In training mode, but without anything that is drawn anew in every pass."""
    model = case.model.to(case.dtype).train()
    for module in model.modules():
        for key, value in list(vars(module).items()):
            drops = "drop" in key or (key == "p" and "Drop" in type(module).__name__)
            if drops and isinstance(value, float):
                setattr(module, key, 0.0)
    return model


def _freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if "BatchNorm" in type(module).__name__:
            module.eval()


def _captured(model: nn.Module, case: Case, **keywords: Value) -> Tensor:
    source = PerSample(model, Layout(model), **keywords)
    try:
        model.zero_grad()
        _loss(model(**_typed(case.inputs, case.dtype))).backward()
        rows = source.take()
    finally:
        source.detach()
    if rows is None or len(rows) != case.batch:
        raise RuntimeError(f"{rows if rows is None else len(rows)} rows")
    return rows.clone()


def _largest_error(model: nn.Module, literal: Tensor, rows: Tensor) -> float:
    """Largest deviation over the largest entry of the same parameter."""
    if not literal.isfinite().all() or not literal.any(dim=1).all():
        raise ArithmeticError("a gradient of zero or not finite compares nothing")
    worst = 0.0
    for slot in Layout(model).slots:
        columns = slice(slot.start, slot.stop)
        scale = literal[:, columns].abs().max()
        # A gradient that is zero but for rounding (the bias before a normalisation) is
        # measured against the whole.
        scale = torch.maximum(scale, 1e-5 * literal.abs().max())
        off = (rows[:, columns] - literal[:, columns]).abs().max() / scale
        worst = max(worst, float(off))
    return worst


def _one_backward_a_sample(model: nn.Module, case: Case) -> Tensor:
    layout, rows = Layout(model), []
    for b in range(case.batch):
        own = (case.split or by_first_dimension)(case.inputs, b)
        model.zero_grad()
        _loss(model(**_typed(own, case.dtype))).backward()
        rows.append(layout.gather())
    return torch.stack(rows)


def by_first_dimension(inputs: dict[str, Any], b: int) -> dict[str, Any]:
    """The inputs of sample b where all tensors hold samples first."""
    return {
        k: v[b : b + 1] if isinstance(v, Tensor) and v.ndim and len(v) == BATCH else v
        for k, v in inputs.items()
    }


def _typed(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


_RESULTS = (
    "logits",
    "last_hidden_state",
    "prediction_logits",
    "sample",
    "start_logits",
)


def _loss(output: Value) -> Tensor:
    """A sum over samples of something that depends on every entry of the results."""
    for name in _RESULTS:
        if not isinstance(output, Tensor) and getattr(output, name, None) is not None:
            output = getattr(output, name)
    first = output if isinstance(output, Tensor) else _first(output)
    weights = torch.linspace(0.5, 1.5, first[0].numel(), dtype=first.dtype)
    return (first.tanh() * weights.view(first[0].shape)).sum()


def _first(output: Value) -> Tensor:
    values = output.values() if hasattr(output, "values") else output
    return next(v for v in values if isinstance(v, Tensor) and v.requires_grad)
