"""The samples of a step, after everything that would make one more move the others."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dome.options import FilterOptions
from dome.parameters import Layout
from dome.privacy.accounting import Budget
from dome.privacy.errors import PrivacyError
from dome.privacy.guards import (
    BatchGuard,
    Forward,
    InputGuard,
    ParameterGuard,
    Watch,
    check_independence,
)
from dome.privacy.refuse import check_nothing_else
from dome.samples import PerSample, declared
from dome.samples.tracing.inputs import Roles, Signature

NUM_TESTS = (
    3  # batches that are looked at: in one, sums over samples may agree by chance
)


class PrivateSamples:
    """Gives the samples of a step, each the gradient of its own loss, or refuses.

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
        self._batch_dim = options.batch_dim or 0
        names = declared(options.samples_in)
        self._roles = Roles(Signature.of(model), names)
        self.batches = BatchGuard(
            budget, layout.parameters, InputGuard(model, self._roles, self._batch_dim)
        )
        # Mixing is found by the independence test, as a PrivacyError with its own cure.
        self._source = PerSample(
            model,
            layout,
            batch_dim=options.batch_dim,
            samples_in=names,
            allow_mixing=True,
        )
        self._watch = Watch(model, layout.device, parameters, self.batches)
        self._tested = Counter[tuple[bool, ...]]()

    def take(self) -> Tensor:
        """G (B, D) of the batch that waits; it still waits afterwards."""
        drawn = self.batches.waiting().size
        passes, rows = self._source.rows.num_waiting, self._source.take()
        found = 0 if rows is None else len(rows)
        if found != drawn:
            raise PrivacyError(
                f"the batch has {drawn} samples, and backward() saw {found}: use the "
                f"whole batch once, as it comes from .loader(dataset), and nothing else"
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
                f"backward() was called {passes} times for one step: with parts, use a "
                f"loss that sums, and loss_reduction='sum'"
            )
        rows = rows.to(self._layout.dtype)
        check_nothing_else(rows, self._layout.gather())
        self._check_independence(self.batches.used())
        return rows.mul_(self._options.sample_scale(len(rows)))

    def _check_independence(self, used: Sequence[Forward]) -> None:
        """Test whether the model mixes samples, anew in every mode it is trained in."""
        mode = tuple(module.training for module in self._model.modules())
        if self._tested[mode] == NUM_TESTS:
            return
        with self._watch.paused():
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

    def discard(self) -> None:
        """Forget what was captured."""
        self._source.discard()

    def detach(self) -> None:
        """Remove the hooks from the model."""
        self._source.detach()
        self._watch.detach()
