"""Random Gaussian projection, the paper's compressor.

A gradient g (D,) is sent as z = R g (M,) and recovered as Rᵀ z, with R (M, D) fresh at
every step, entries N(0, 1/M), and rate D/M. The recovered gradient is unbiased with
covariance (‖g‖² I + g gᵀ)/M: the noise is that of the whole norm, in every direction.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dome.linalg import row_blocks

DEFAULT_SEED = 0x736B6574  # not 0: a user's own seed 0 must not give the same noise


@dataclass(frozen=True, slots=True)
class SketchMessage:
    """What travels: M numbers, and the seed both sides draw R from.

    Attributes:
        values: z = R g, shape (M,).
        dim: Length D of the gradient.
        seed: Seed of R.
    """

    values: Tensor
    dim: int
    seed: int

    @property
    def num_bits(self) -> int:
        """Size of the message: the numbers and a 64-bit seed."""
        return self.values.numel() * self.values.element_size() * 8 + 64


class GaussianSketch:
    """Compresses a gradient to D/rate random projections and recovers it.

    Calling it is the round trip, g → Rᵀ R g, drawn exactly in distribution with O(D)
    random numbers and without R. ``encode`` and ``decode`` form R block by block, O(D
    M).

    Args:
        rate: D/M, between 1 and D. At rate 1 the sketch is noisy too: RᵀR is not I.
        generator: Source of the noise, on the gradient's device. Without one, a
            generator with a fixed seed is made at first use.
    """

    def __init__(
        self, rate: float, *, generator: torch.Generator | None = None
    ) -> None:
        if not (math.isfinite(rate) and rate >= 1):
            raise ValueError(f"rate must be a number of at least 1, got {rate}")
        self.rate = rate
        self._generator = generator
        self._is_default = generator is None

    def sketch_size(self, dim: int) -> int:
        """M for a gradient of D numbers."""
        if self.rate > dim:
            raise ValueError(
                f"rate must be at most the number of parameters {dim} (one number "
                f"sent), got {self.rate}"
            )
        return max(1, round(dim / self.rate))

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> Tensor:
        """A draw of Rᵀ R g for a gradient of shape (D,)."""
        m = self.sketch_size(_length(gradient))
        g, random = gradient, self._random(gradient.device)
        x = torch.randn(g.shape, generator=random, device=g.device, dtype=g.dtype)
        norm2 = g.dot(g)
        # Given R g, the part of R orthogonal to g is still fresh: x made orthogonal to
        # g times ‖R g‖/√M; and ‖R g‖² is ‖g‖² χ²(M)/M.
        chi2 = torch.randn(m, generator=random, device=g.device, dtype=g.dtype).square()
        q = chi2.sum() / m
        along = torch.where(norm2 > 0, x.dot(g) / norm2, torch.zeros_like(norm2))
        across = (q * norm2 / m).sqrt()
        return (q - across * along) * g + across * x

    @torch.no_grad()
    def encode(self, gradient: Tensor) -> SketchMessage:
        """The message R g of a gradient of shape (D,)."""
        m = self.sketch_size(_length(gradient))
        random = self._random(gradient.device)
        seed = int(torch.randint(2**62, (), generator=random, device=gradient.device))
        values = gradient.new_zeros(m)
        for rows, block in _projection_blocks(len(gradient), m, seed, gradient):
            values += gradient[rows] @ block
        return SketchMessage(values=values, dim=len(gradient), seed=seed)

    @torch.no_grad()
    def decode(self, message: SketchMessage) -> Tensor:
        """The gradient Rᵀ z recovered from a message, shape (D,)."""
        m = self.sketch_size(message.dim)
        if message.values.shape != (m,):
            raise ValueError(
                f"a sketch of {message.dim} numbers at rate {self.rate} has {m} "
                f"values, this message has shape {tuple(message.values.shape)}"
            )
        gradient = message.values.new_zeros(message.dim)
        blocks = _projection_blocks(message.dim, m, message.seed, message.values)
        for rows, block in blocks:
            gradient[rows] = block @ message.values
        return gradient

    def state_dict(self) -> dict[str, Tensor]:
        """The generator's state, so that a resumed run draws the same noise."""
        if self._generator is None:
            return {}
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the noise of a saved state; one from before any use starts it."""
        if "generator" not in state and self._is_default:
            self._generator = None
        if "generator" in state:
            if self._generator is None:
                self._generator = torch.Generator()
            self._generator.set_state(state["generator"].cpu())

    def _random(self, device: torch.device) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(DEFAULT_SEED)
        return self._generator


def _length(gradient: Tensor) -> int:
    if gradient.dim() != 1:
        raise ValueError(f"a gradient is a vector (D,), got {tuple(gradient.shape)}")
    return len(gradient)


def _projection_blocks(
    dim: int, size: int, seed: int, like: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Rᵀ, a block of its D rows at a time, the same for the same seed."""
    random = torch.Generator(like.device).manual_seed(seed)
    for rows in row_blocks(dim):
        block = torch.randn(
            rows.stop - rows.start,
            size,
            generator=random,
            device=like.device,
            dtype=like.dtype,
        )
        yield rows, block / size**0.5
