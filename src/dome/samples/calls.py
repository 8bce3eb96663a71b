"""How a batch becomes a loss: one convention for every function that takes inputs.

    given                          the model is called as    the loss is
    x, y and loss_fn               model(x)                  loss_fn(results, y)
    x and loss_fn                  model(x)                  loss_fn(results)
    (x1, x2), a tuple or a list    model(x1, x2)             as above
    {"a": .., "b": ..}, a mapping  model(a=.., b=..)         as above
    a=.., b=.. by keyword          model(..., a=.., b=..)    as above
    loss_fn=None                   model(x), model(x, y)     the model's own

A model's own loss is what it returns, ``.loss`` or ``["loss"]`` of that, or the first
scalar in a tuple: ``(loss, logits)`` and ``(logits, loss)`` both do. A model whose one
input is a tuple or a dictionary gets it inside a tuple: ``({"ids": ids},)``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor, nn

from dome.samples.tracing.nested import Value

LossFn = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of a model on one batch, and the loss of what it returns.

    Attributes:
        args: Inputs by place.
        kwargs: Inputs by name.
        loss_fn: Maps results and targets to a scalar; None: the model's own loss.
        targets: What ``loss_fn`` takes behind the results.
    """

    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    loss_fn: LossFn | None
    targets: tuple[Value, ...] = ()

    @classmethod
    def of(
        cls,
        loss_fn: LossFn | None,
        x: Value = None,
        y: Value = None,
        more: Mapping[str, Value] | None = None,
    ) -> "LossCall":
        """From the arguments of a public function.

        Args:
            loss_fn: As above.
            x: One input, a tuple or list of inputs, or a mapping of named ones.
            y: Targets; the last input of a model that returns its loss.
            more: More inputs by name.
        """
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function of results and targets, or None for a "
                f"model that returns its loss, got {type(loss_fn).__name__}"
            )
        args, kwargs = _placed(x)
        targets = () if y is None else (y,)
        kwargs |= more or {}
        if loss_fn is None and targets and isinstance(x, Mapping):
            raise ValueError(
                "y has no name next to inputs by name: put it into them, under the "
                'name that forward() gives it, such as {"labels": y}'
            )
        if not args and not kwargs:
            raise ValueError("no input: give x, or the model's inputs by name")
        if loss_fn is None:
            args, targets = (*args, *targets), ()
        return cls(args, kwargs, loss_fn, targets)

    @classmethod
    def of_batch(cls, loss_fn: LossFn | None, batch: Value) -> "LossCall":
        """From what a data loader yields: a mapping, a tensor, or ``(x, ..., y)``."""
        if type(batch) not in (tuple, list):
            return cls.of(loss_fn, batch)
        if loss_fn is None or len(batch) == 1:
            return cls.of(loss_fn, tuple(batch))
        *inputs, y = batch
        return cls.of(loss_fn, inputs[0] if len(inputs) == 1 else inputs, y)

    def to(self, device: torch.device) -> "LossCall":
        """The same with all tensors on a device."""
        whole = (self.args, self.kwargs, self.targets)
        args, kwargs, targets = rebuilt(whole, lambda t: t.to(device))
        return LossCall(args, kwargs, self.loss_fn, targets)

    def results(self, model: nn.Module) -> Value:
        """What the model returns."""
        return model(*self.args, **self.kwargs)

    def loss_of(self, results: Value) -> Tensor:
        """The loss of what the model returned, a scalar."""
        if self.loss_fn is None:
            return own_loss(results)
        return self.loss_fn(results, *self.targets)

    def loss(self, model: nn.Module) -> Tensor:
        """The loss of the batch."""
        return self.loss_of(self.results(model))


def own_loss(results: Value) -> Tensor:
    """The loss among what a model returns: see the head of this file."""
    found: list[Value] = []
    if isinstance(results, Tensor):
        found = [results]
    elif isinstance(results, Mapping):
        found = [results.get("loss")]
    elif hasattr(results, "loss"):
        found = [results.loss]
    elif isinstance(results, tuple | list):
        # Logits of one sample and one class hold one number, too: scalars first.
        found = sorted(filter(_is_one_number, results), key=lambda t: t.ndim)
    if not found or not _is_one_number(found[0]):
        raise ValueError(
            f"the model returned {type(results).__name__} without a scalar loss: pass "
            "a loss_fn, or the labels that the model needs for its own"
        )
    return found[0].reshape(())


def _is_one_number(value: Value) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _placed(x: Value) -> tuple[tuple[Value, ...], dict[str, Value]]:
    """Inputs by place and by name."""
    if x is None:
        return (), {}
    if isinstance(x, Mapping):
        return (), dict(x)
    # Not a named tuple, such as a packed sequence, which is one input.
    return (tuple(x) if type(x) in (tuple, list) else (x,)), {}


def rebuilt(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """The same containers with every tensor in them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        made = {k: rebuilt(v, change) for k, v in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, tuple | list):
        parts = [rebuilt(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{n: rebuilt(getattr(value, n), change) for n in names})
    return value
