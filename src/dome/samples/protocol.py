"""What the filter asks of a source of gradient samples. B samples, D parameters.

Samples come in two kinds:

    rows      G (B, D)                          → trackers with a basis (D, K)
    factors   δ (B, T, out), a (B, T, in)       → trackers with directions of low rank
              of each weight matrix

Factors are what rows are products of: a tracker whose directions are thin products
themselves needs nothing but their products with its own factors
(``dome.trackers.factors``), so that nothing of size B·D is ever formed. Both kinds are
collected by takers of one capture; see ``dome.samples.store.sink``.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol, TypeGuard

from torch import Tensor

from dome.trackers.factors import FactorBatch
from dome.trackers.parts import PartialRows

# No named inputs.
NONE: Mapping[str, object] = MappingProxyType({})


class SampleSource(Protocol):
    """Collects gradient samples from the user's own ``backward()`` calls.

    Attributes:
        samples_per_row: How many samples of the data there are in each that was taken
            last: one, but with micro-batches; NaN where nobody knows.
    """

    samples_per_row: float

    def arm(self, active: bool) -> None:
        """End a step: choose whether forward passes from now on are captured.

        To be called when ``.grad`` is as the optimizer will see it, so that the next
        step knows what was written since.
        """

    def watch(
        self,
        inputs: Sequence[object],
        named: Mapping[str, object] = NONE,
        samples_in: tuple[str, ...] | None = None,
    ) -> AbstractContextManager[None]:
        """Capture what is computed inside, as a call of the model with these inputs.

        Args:
            inputs: Those without a name; they are called ``inputs[0]`` and so on.
            named: Those with one.
            samples_in: Which of them hold samples, if not what the model's own do.
        """

    def expect(self, loss: Tensor) -> None:
        """Announce that ``backward()`` starts at this tensor next."""

    def paused(self) -> AbstractContextManager[None]:
        """Let forward passes inside go by; their gradients are no sample's."""

    def take(self, due: bool = True) -> Tensor | None:
        """Hand over the samples since the last call as rows (B, D), and forget them.

        The rows sum to the gradient that ``backward()`` put in ``.grad``, but for what
        a penalty on the weights added; for a mean loss a sample's own gradient is its
        row times B. The tensor may be reused: it is valid until the next
        ``backward()``. The device is waited for at most once.

        Args:
            due: Whether a step without samples is an error, if gradients were filled.
                Not if the samples of this step came by another way.

        Returns:
            None if there was nothing to capture: no gradient, gradients of zeros, a
            batch of no samples, or no ``backward()`` since the last step.
        """

    def discard(self) -> None:
        """Forget what was captured since the last ``take()``."""

    def detach(self) -> None:
        """Remove every hook from the model."""


class CompactSource(SampleSource, Protocol):
    """A source that also gives samples in less space than rows."""

    def take_compact(
        self, due: bool = True
    ) -> Tensor | PartialRows | FactorBatch | None:
        """The samples since the last call, without what is zero, or as products.

        Of large embeddings the words that samples have. With directions of low rank
        products of inputs and output gradients where the parameter is a matrix that
        samples are multiplied with; rows (B, *parameter) where it is not.
        """


def is_compact(source: SampleSource) -> TypeGuard[CompactSource]:
    """Whether a source gives samples in less space than rows."""
    return hasattr(source, "take_compact")
