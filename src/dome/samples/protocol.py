"""What the filter asks of a source of gradient samples. B samples, D parameters.

Samples come in two kinds:

    rows      G (B, D)                          → trackers with a basis (D, K)
    factors   δ (B, T, out), a (B, T, in)       → trackers with directions of low rank
              of each weight matrix

Rows are what every source gives today. Factors are what rows are products of: a tracker
whose directions are thin products themselves needs nothing but their products with its
own factors, so that nothing of size B·D is ever formed. Both kinds are collected by
takers of one capture; see ``dome.samples.store.wanted`` and ``sources.capture``.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class SampleSource(Protocol):
    """Collects gradient samples from the user's own ``backward()`` calls, as rows."""

    def arm(self, active: bool) -> None:
        """End a step: choose whether forward passes from now on are captured.

        To be called when ``.grad`` is as the optimizer will see it, so that the next
        step knows what was written since.
        """

    def watch(self, inputs: object) -> AbstractContextManager[None]:
        """Capture what is computed inside, as a call of the model with these inputs."""

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


@dataclass(frozen=True, slots=True)
class Factors:
    """The samples of one weight matrix (out, in) as the products they are.

        G[b] = Σ_t δ[b, t] a[b, t]ᵀ

    over the positions t of sample b: one for a vector, the words of a text, the
    patches under a convolution's kernel (then in is channels times kernel).

    Attributes:
        deltas: δ, gradients of the outputs, shape (B, T, out).
        inputs: a, shape (B, T, in).
    """

    deltas: Tensor
    inputs: Tensor

    def rows(self) -> Tensor:
        """G, multiplied out after all, shape (B, out, in)."""
        return self.deltas.mT @ self.inputs


class FactorSource(Protocol):
    """A source of the second kind: as ``SampleSource``, but for what ``take`` gives."""

    def take(self) -> dict[str, Factors | Tensor] | None:
        """The samples since the last call, by the name of the parameter.

        Factors where the parameter is a matrix that samples are multiplied with; rows
        (B, *parameter) where it is not (biases, norms), which are small.
        """
