"""One model of the zoo: does a filter change its forward pass, are its rows exact?

Shapes: rows (B, D), one sample a row.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dome
from dome.parameters import Layout
from dome.samples import PerSample
from dome.samples.tracing.nested import all_tensors
from dome.verification import ROUNDINGS, TOLERANCE
from model_zoo.case import Case, Inputs, Value


@dataclass(frozen=True)
class Verdict:
    """What the zoo found of one model.

    Attributes:
        library: Which of the zoo's tables it is in.
        name: What the table calls it.
        forward: "identical" if a filter changes no bit of any result, in training and
            in evaluation; "differs"; empty if the filter refuses the model.
        result: "exact", "exact with ...", "refused", "wrong", "not tried" or "failed".
        error: Largest deviation of a row, over the parameter's largest entry.
        dtype: The type whose roundings explain the error: float32 where torch has no
            float64 kernel, or where the model itself computes in float32.
        reason: Why it is refused as it is, or with every option; where it is wrong.
    """

    library: str
    name: str
    forward: str
    result: str
    error: float | None = None
    dtype: str = ""
    reason: str = ""


Changes = dict[str, bool]
# What to try where a model as it is cannot be captured, as the tables say it.
OPTIONS: dict[str, Changes] = {
    "": {},
    " with `.eval()` on its batch norms": {"frozen": True},
    " with `samples_in`": {"declared": True},
}


@patch("torch.seed", lambda: 0)  # where Reformer takes the seeds of its layers from
def judge(library: str, name: str, make: Callable[[], Case]) -> Verdict:
    """What a filter does to one model, as it is and with its batch norms frozen."""
    refusals: list[str] = []
    for option, changes in OPTIONS.items():

        def again(changes: Changes = changes) -> Case:
            _seed()
            return replace(make(), **changes)

        if changes.get("declared") and not again().samples_in:
            continue
        forward, dtype = "", _dtype(again)
        try:
            forward = "identical" if _is_identical(again()) else "differs"
            error, where = max(_in_training(again(), dtype), _alone(again(), dtype))
        except (RuntimeError, ValueError) as problem:
            refusals.append(str(problem))
            continue
        if error > TOLERANCE[dtype] and _computes_in_float32(again()):
            dtype = torch.float32
        exact = error <= TOLERANCE[dtype]
        result = f"exact{option}" if exact else "wrong"
        reason = where if not exact else refusals[0] if refusals else ""
        return Verdict(library, name, forward, result, error, _plain(dtype), reason)
    return Verdict(library, name, forward, "refused", reason=refusals[-1])


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _seed() -> None:
    """The generators that models draw from: dropout, SpecAugment's masks, LayerDrop."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (what Transformers draws from)
    random.seed(0)


def _dtype(again: Callable[[], Case]) -> torch.dtype:
    """float64 if the model as it is can train in it; a failure of its own is none."""
    try:
        _run(again(), torch.float64).backward()
    except RuntimeError:
        _run(again(), torch.float32).backward()
        return torch.float32
    return torch.float64


class _Types(TorchDispatchMode):
    """The types of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Value, types: Value, args: Value = (), kwargs: Value = None
    ) -> Value:
        found = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype for t in all_tensors(found)}
        return found


def _computes_in_float32(case: Case) -> bool:
    with _Types() as types:
        _run(case, torch.float64)
    return torch.float32 in types.seen


def _run(case: Case, dtype: torch.dtype) -> Tensor:
    model, inputs = case.put(dtype)
    return _loss(model(**inputs))


def _is_identical(case: Case) -> bool:
    """Whether every result is the same, bit for bit, with a filter attached."""
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    same = True
    for training in (True, False):
        model, inputs = case.put(torch.float32, training=training)
        plain, twice = _results(model, inputs), _results(model, inputs)
        if not _equal(plain, twice):
            raise ArithmeticError("the model itself gives other results each time")
        with dome.attach(model, optimizer, rank=2, samples_in=case.names):
            same &= _equal(plain, _results(model, inputs))
    return same


def _results(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    _seed()
    return [t.detach().clone() for t in all_tensors(model(**inputs))]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


Error = tuple[float, str]


def _in_training(case: Case, dtype: torch.dtype) -> Error:
    """Rows in training mode, against the share of each sample in the same results.

    The literal rows are vector-Jacobian products of the results of one sample: the same
    forward pass, so that dropout and masks are the same.
    """
    model, inputs = case.put(dtype)
    layout = Layout(model)
    rows = _captured(case, model, inputs, layout)
    gradient = layout.gather().clone()
    _seed()
    result = _result(model(**inputs))
    (delta,) = torch.autograd.grad(_loss(result), result, retain_graph=True)
    literal = []
    for b in range(case.batch):
        own = torch.zeros_like(delta)
        own[b] = delta[b]
        literal.append(_gradient(result, own, layout))
    whole = torch.stack(literal).sum(0, keepdim=True)
    return max(
        _worst("in training", layout, rows, torch.stack(literal)),
        _worst("the gradient itself", layout, gradient[None], whole),
    )


def _gradient(result: Tensor, delta: Tensor, layout: Layout) -> Tensor:
    parameters = layout.parameters
    grads = torch.autograd.grad(
        result, parameters, delta, retain_graph=True, allow_unused=True
    )
    pairs = zip(parameters, grads, strict=True)
    flat = [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs]
    return torch.cat(flat)


def _captured(case: Case, model: nn.Module, inputs: Inputs, layout: Layout) -> Tensor:
    batch = case.batch
    with _source(model, layout, case.names) as source:
        model.zero_grad()
        _seed()
        _loss(model(**inputs)).backward()
        rows = source.take()
        if rows is None or len(rows) != batch:
            found = "no" if rows is None else len(rows)
            raise RuntimeError(f"{found} rows of {batch} samples")
        return rows.clone()


@contextmanager
def _source(
    model: nn.Module, layout: Layout, names: tuple[str, ...] | None
) -> Iterator[PerSample]:
    source = PerSample(model, layout, samples_in=names)
    try:
        yield source
    finally:
        source.detach()


def _alone(case: Case, dtype: torch.dtype) -> Error:
    """Rows in evaluation mode, against one forward and backward a sample."""
    if case.split is None:
        model, inputs = case.put(dtype)
        report = dome.verify(model, _loss, inputs, samples_in=case.names)
        return max((e.error, f"alone: {e.name}") for e in report.errors)
    model, inputs = case.put(dtype, training=False)
    layout = Layout(model)
    rows, literal = _captured(case, model, inputs, layout), []
    for b in range(case.batch):
        model.zero_grad()
        own = case.typed(case.split(case.inputs, b), dtype)
        _loss(model(**own)).backward()
        literal.append(layout.gather())
    return _worst("alone", layout, rows, torch.stack(literal))


def _worst(how: str, layout: Layout, rows: Tensor, literal: Tensor) -> Error:
    """Largest deviation over the largest entry of the same parameter, and its name."""
    if not literal.isfinite().all() or not literal.any(dim=1).all():
        raise ArithmeticError("a gradient of zero or not finite compares nothing")
    rounding = ROUNDINGS * torch.finfo(literal.dtype).eps / TOLERANCE[literal.dtype]
    worst = (0.0, "")
    for slot in layout.slots:
        own = slice(slot.start, slot.stop)
        largest = literal[:, own].abs().max()
        scale = torch.maximum(largest, rounding * literal.abs().max())
        off = (rows[:, own] - literal[:, own]).abs().max() / scale
        worst = max(worst, (float(off), f"{how}: {slot.name}"))
    return worst


_RESULTS = (
    "logits",
    "last_hidden_state",
    "prediction_logits",
    "sample",
    "start_logits",
)


def _loss(output: Value) -> Tensor:
    """A sum over samples of something that depends on every entry of the results."""
    result = _result(output)
    weights = torch.linspace(0.5, 1.5, result[0].numel(), dtype=result.dtype)
    return (result.tanh() * weights.view(result[0].shape)).sum()


def _result(output: Value) -> Tensor:
    """The tensor of a model's results that the loss is taken of."""
    if isinstance(output, Tensor):
        return output
    for name in _RESULTS:
        found = getattr(output, name, None)
        if found is not None:
            return _result(found)
    values = output.values() if hasattr(output, "values") else output
    return next(v for v in values if isinstance(v, Tensor) and v.requires_grad)
