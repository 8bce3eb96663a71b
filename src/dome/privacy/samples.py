"""The samples of a step, after everything that would make one more move the others."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dome.options import FilterOptions
from dome.parameters import Layout
from dome.privacy.accounting import Budget, PrivacyError
from dome.privacy.batches import BatchGuard, Forward
from dome.privacy.independence import bag_bounds, check_independence
from dome.privacy.parameters import ParameterGuard
from dome.privacy.refuse import check_products
from dome.samples import PerSample, declared
from dome.samples.tracing.inputs import Roles, Signature

# Batches that are tested for mixing: in one, sums over samples may agree by chance.
NUM_TESTS = 3
LOST = 1e-3  # of the samples' norms: more than rounding, less than any penalty


class PrivateSamples:
    """Gives the samples of a step, each the gradient of its own loss, or refuses.

    Hooks on the model check parameters and settings before every call, and note what
    it was called with.

    Args:
        model: The model that is trained.
        layout: Its tracked parameters.
        parameters: Is asked before every call of the model.
        budget: Pays for batches that no step was taken with.
        options: How the loss sums up samples, and where the model's input has them.

    Attributes:
        batches: Knows the batch of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        parameters: ParameterGuard,
        budget: Budget,
        options: FilterOptions,
    ) -> None:
        self._model, self._layout, self._options = model, layout, options
        self._parameters, self._batch_dim = parameters, options.batch_dim or 0
        self.batches = BatchGuard(budget, layout.parameters)
        names = declared(options.samples_in)
        self._roles = Roles(Signature.of(model), names)
        # What leaves torch and comes back is found by the independence test alone.
        self._source = PerSample(
            model,
            layout,
            batch_dim=options.batch_dim,
            samples_in=names,
            strict=PrivacyError,
        )
        self._tested = Counter[tuple[bool, ...]]()
        self._depth, self._active = 0, True
        self._call: Forward | None = None
        # First of all: what is refused is not captured.
        before = {"with_kwargs": True, "prepend": True}
        self._handles = (
            model.register_forward_pre_hook(self._before, **before),
            model.register_forward_hook(self._after, always_call=True),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model takes its hooks along; there they must do nothing.
        return _inert, ()

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # A model that calls itself is one call.
        self._depth += 1
        if self._depth > 1 or not self._active:
            return
        self._parameters.check()
        if torch.is_grad_enabled() and self.batches.is_waiting:
            check_products(self._layout.device)
            first = self._first(args, kwargs)
            self._call = Forward((args, kwargs), first, self._batch_dim)
            self.batches.saw(self._call)

    def _after(self, _: nn.Module, __: object, output: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._call is not None:
            call, self._call = self._call, None
            self.batches.follow(call, output)

    def _first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The first input that holds samples, or a refusal.

        A fixed input that is as long as the batch would be taken for samples, and the
        gradients of its entries for theirs: clipping these bounds nothing.
        """
        named = self._roles.named(args, kwargs)
        several = [name for name, t in named if t.ndim]
        found = [t for _, t in named]
        if len(several) < 2 or bag_bounds(self._model, found) is not None:
            return found[0] if found else torch.zeros(0)
        if self._roles.declared is None:
            raise PrivacyError(
                "the model is called with several tensors, "
                f"{', '.join(map(repr, several))}, and it is not certain which of them "
                f"hold samples: name them, attach(..., samples_in=({several[0]!r},)); "
                "all others must be the same for all samples"
            )
        places = self._roles.assigned(named, self._batch_dim)[1]
        return dict(named)[next(iter(places))]

    def take(self) -> Tensor:
        """G (B, D) of the batch that waits; it still waits afterwards."""
        drawn = self.batches.waiting().size
        passes, rows = self._source.rows.num_waiting, self._source.take()
        found = 0 if rows is None else len(rows)
        if found != drawn:
            raise PrivacyError(
                f"the batch has {drawn} samples, but backward() saw {found}: use the "
                "whole batch once, as it comes from .loader(dataset), and nothing else"
            )
        if rows is None:
            return torch.zeros(
                (0, self._layout.dim),
                dtype=self._layout.dtype,
                device=self._layout.device,
            )
        if passes > 1 and self._options.loss_reduction == "mean":
            # Parts divide by their own sizes, so that one sample more would change how
            # much the others of its part weigh: clipping bounds no such change.
            raise PrivacyError(
                f"backward() was called {passes} times for one step: to split a batch, "
                "use a loss that sums, and loss_reduction='sum'"
            )
        rows = rows.to(self._layout.dtype)
        _check_nothing_else(rows, self._layout.gather())
        self._check_independence(self.batches.used())
        return rows.mul_(self._options.sample_scale(len(rows)))

    def _check_independence(self, used: Sequence[Forward]) -> None:
        """Test whether the model mixes samples, anew in every mode it is trained in."""
        mode = tuple(module.training for module in self._model.modules())
        if self._tested[mode] == NUM_TESTS:
            return
        with self._paused():
            tested = any(
                check_independence(
                    self._model,
                    self._layout,
                    call.inputs,
                    call.reached,
                    self._roles,
                    batch_dim=self._batch_dim,
                    mean=self._options.loss_reduction == "mean",
                )
                for call in used
            )
        self._tested[mode] += tested

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Let the model be called unseen."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def discard(self) -> None:
        """Forget what was captured."""
        self._source.discard()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        self._source.detach()
        for handle in self._handles:
            handle.remove()


def _inert() -> PrivateSamples:
    samples = object.__new__(PrivateSamples)
    samples._depth, samples._active, samples._call = 0, False, None
    return samples


def _check_nothing_else(rows: Tensor, gradient: Tensor) -> None:
    """Refuse a loss with terms that are no sample's, which would be lost.

    Args:
        rows: The samples as they were captured, shape (B, D).
        gradient: What autograd made of the loss, shape (D,).
    """
    difference = torch.linalg.vector_norm(rows.sum(dim=0) - gradient)
    size = torch.linalg.vector_norm(rows, dim=1).sum()
    # A sample that is not finite makes this false, and is dealt with later.
    if difference > LOST * size:
        raise PrivacyError(
            "part of .grad belongs to no sample: a penalty in the loss, or a gradient "
            "that zero_grad() did not clear. Call zero_grad() before backward(), and "
            "use the optimizer's weight_decay instead of a penalty"
        )
