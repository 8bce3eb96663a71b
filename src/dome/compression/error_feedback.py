"""Error feedback: what compression dropped is added to the next gradient.

Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., ICML 2019. With g (D,)
the gradient of a step, e the memory and C the compressor, scaled to be a contraction:

    c = C(g + e₋₁),    e = g + e₋₁ − c
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from dome.compression.message import Message
from dome.compression.protocol import Compressor, Unbiased
from dome.compression.vector import check_shape
from dome.torch_private import own_arithmetic

INNER = "compressor."


class ErrorFeedback:
    """Remembers what compression dropped and adds it to the next gradient.

    After every step the vector that arrives and the memory together lose nothing:

        c + e  =  g + e₋₁

    so all that arrived so far and the memory are the sum of all gradients. The memory
    stays bounded only if C contracts, ‖C(v) − v‖ < ‖v‖ on average. Top-k, signs and
    PowerSGD do. An unbiased compressor with E‖C(v) − v‖² ≤ ω ‖v‖² in general does not,
    but C/(1 + ω) does (Richtárik et al., EF21, 2021), and is what is used: random-k,
    for example, then sends entries as they are.

    Args:
        compressor: Any, but not another ``ErrorFeedback``.
    """

    is_unbiased = False

    def __init__(self, compressor: Compressor) -> None:
        if isinstance(compressor, type) or not hasattr(compressor, "encode"):
            raise TypeError(
                "ErrorFeedback needs a compressor, as in "
                f"ErrorFeedback(TopK(rate=100)), got {compressor!r}"
            )
        if isinstance(compressor, ErrorFeedback):
            raise ValueError("the compressor has error feedback already")
        self.compressor = compressor
        self.error: Tensor | None = None

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.compressor!r})"

    @property
    def is_linear(self) -> bool:
        """Whether messages may be summed: those of the compressor inside."""
        return self.compressor.is_linear

    def set_worker(self, index: int) -> None:
        """Say which worker this is, to a compressor with noise of its own."""
        if hasattr(self.compressor, "set_worker"):
            self.compressor.set_worker(index)

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, all that travels."""
        return self.compressor.num_bits(dim)

    def scale(self, dim: int) -> float:
        """What recovered vectors of D numbers are multiplied with: 1/(1 + ω)."""
        if not self.compressor.is_unbiased:
            return 1.0
        return 1 / (1 + cast("Unbiased", self.compressor).variance(dim))

    @own_arithmetic
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector (D,) and the memory; the memory keeps the rest."""
        carried = self.carried(vector)
        message = self.compressor.encode(carried).wrapped()
        self.remember(carried - self.decode(message))
        return message

    @own_arithmetic
    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,)."""
        recovered = self.compressor.decode(message.wrapped())
        return recovered * self.scale(len(recovered))

    @own_arithmetic
    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,) and the memory."""
        carried = self.carried(vector)
        recovered = self.compressor(carried) * self.scale(len(carried))
        self.remember(carried - recovered)
        return recovered

    def carried(self, vector: Tensor) -> Tensor:
        """g + e₋₁ for a vector g of shape (D,): what is to be compressed."""
        check_shape(vector)
        if self.error is None:
            return vector
        if self.error.shape != vector.shape:
            raise ValueError(
                f"the memory holds {len(self.error)} numbers, the gradient has "
                f"{len(vector)}: use one ErrorFeedback for one model"
            )
        return vector + self.error.to(vector)

    def remember(self, error: Tensor) -> None:
        """Keep e = g + e₋₁ − c, shape (D,), for the next step.

        One that is not finite is left out and the memory stays as it was, or it would
        spoil all steps to come: a called ``GaussianSketch`` passes on such gradients.
        """
        before = torch.zeros_like(error) if self.error is None else self.error
        low, high = torch.aminmax(error)
        is_finite = low.isfinite() & high.isfinite()
        self.error = torch.where(is_finite, error, before.to(error))

    def state_dict(self) -> dict[str, Tensor]:
        """The memory and the state of the compressor."""
        inner = self.compressor.state_dict()
        state = {f"{INNER}{name}": value for name, value in inner.items()}
        return state if self.error is None else {"error": self.error.clone(), **state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; without a memory in it, the memory is empty."""
        error = state.get("error")
        if error is not None and not (error.dim() == 1 and error.isfinite().all()):
            raise ValueError(
                "'error' in the state of an ErrorFeedback, shape "
                f"{tuple(error.shape)}, is not a vector of finite numbers: the file is "
                "damaged; go back to an older one"
            )
        self.compressor.load_state_dict(
            {
                name.removeprefix(INNER): value
                for name, value in state.items()
                if name.startswith(INNER)
            }
        )
        self.error = None if error is None else error.clone()
