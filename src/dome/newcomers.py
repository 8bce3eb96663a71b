"""Parameters that come after a filter was attached: added, unfrozen or replaced.

A basis has a row for each parameter it was made for. One that is trained and has none
would go by unfiltered, so it is refused by name.
"""

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from dome.parameters import matches


class Newcomers:
    """Looks for parameters that are trained now and were not when this was made.

    What was trained then and left out on purpose may stay so.

    Args:
        model: Whose parameters they are; of others, none is filtered anyway.
        trained: What is trained: the parameters of an optimizer, or of the model.
        patterns: Names of those to be filtered; any, if not given.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[Tensor],
        patterns: Sequence[str] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._patterns = patterns
        # The parameters themselves: a number is given again when its tensor is gone,
        # and torch cannot exchange the data of a tensor that has weak references.
        self._known = {id(p): p for p in trained if p.requires_grad}

    def check(self, trained: Iterable[Tensor] | None = None) -> None:
        """Raise ``RuntimeError`` for a parameter that would train unfiltered.

        Args:
            trained: What is trained now; the model's parameters, if not given.
        """
        if trained is None:
            model = self._model()
            trained = () if model is None else model.parameters()
        for p in trained:
            if p.requires_grad and id(p) not in self._known:
                self._refuse(p)
                self._known[id(p)] = p

    def _refuse(self, p: Tensor) -> None:
        model = self._model()
        for name, own in () if model is None else model.named_parameters():
            wanted = self._patterns is None or matches(name, self._patterns)
            if own is p and wanted:
                raise RuntimeError(
                    f"parameter {name!r} is trained, but was added, unfrozen or "
                    "replaced after the filter was attached, and would stay "
                    "unfiltered: detach() the filter and attach again, its basis "
                    "starts anew; or name what is to be filtered, parameters=... of "
                    "dome.attach, to leave the rest alone"
                )


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"]]
