"""What the filter asks of a source of gradient samples. B samples, D parameters."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class SampleSource(Protocol):
    """Collects gradient samples from the user's own ``backward()`` calls."""

    def arm(self, active: bool) -> None:
        """Choose whether forward passes from now on are captured (the default)."""

    def watch(self, inputs: object) -> AbstractContextManager[None]:
        """Capture what is computed inside, as a call of the model with these inputs."""

    def expect(self, loss: Tensor) -> None:
        """Announce that ``backward()`` starts at this tensor next."""

    def take(self) -> Tensor | None:
        """Hand over the samples since the last call as rows (B, D), and forget them.

        The rows sum to the gradient that ``backward()`` put in ``.grad``; for a mean
        loss a sample's own gradient is its row times B. The tensor may be reused: it
        is valid until the next ``backward()``. None if nothing was captured.
        """

    def discard(self) -> None:
        """Forget what was captured since the last ``take()``."""

    def detach(self) -> None:
        """Remove every hook from the model."""
