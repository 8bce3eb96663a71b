"""Random Gaussian projection, the paper's compressor.

A gradient g (D,) is sent as z = R g (M,) and recovered as Rᵀ z, with R (M, D) fresh at
every step, entries N(0, 1/M), and rate D/M. The recovered gradient is unbiased with
covariance (‖g‖² I + g gᵀ)/M: the noise is that of the whole norm, in every direction.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dome.compression.noise import DEFAULT_SEED
from dome.compression.sketch import Sketch, num_sent
from dome.compression.vector import check_shape, power_of_two
from dome.torch_private import own_arithmetic

BLOCK_NUMBERS = 2**20  # of R that exist at a time


class GaussianSketch(Sketch):
    """Compresses a gradient to D/rate random projections and recovers it.

    Calling it is the round trip, g → Rᵀ R g, drawn exactly in distribution with O(D)
    random numbers and without R: right where one process simulates compression.
    ``encode`` and ``decode`` are for real workers. All of them draw the same R from
    (seed, step), block by block and never stored, so messages of a step may be summed;
    that takes D M random numbers on either side. ``HadamardSketch`` does the same in
    O(D log D).

    Args:
        rate: D/M, between 1 and D. At rate 1 the sketch is noisy too: RᵀR is not I.
        generator: Source of the noise of calls, on the gradient's device. Without one,
            a generator with a fixed seed is made at first use.
        seed: Of R; must be the same on all workers, as must the kind of device.
        value_dtype: What numbers are sent in: torch.float32, float64 or bfloat16.
    """

    def __init__(
        self,
        rate: float,
        *,
        generator: torch.Generator | None = None,
        seed: int = DEFAULT_SEED,
        value_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(rate, seed=seed, value_dtype=value_dtype)
        self._generator = generator
        self._is_default = generator is None
        # Of a generator whose device is not known yet.
        self._saved: Tensor | None = None

    def name_on(self, device: torch.device) -> str:
        """Its name and the kind of device: generators of others draw another R."""
        return f"{self.name} on {device.type}"

    def variance(self, dim: int) -> float:
        """ω = (D + 1)/M, with E‖C(g) − g‖² = ω ‖g‖²."""
        return (dim + 1) / num_sent(dim, self.rate)

    @own_arithmetic
    def __call__(self, vector: Tensor) -> Tensor:
        """A draw of Rᵀ R g for a vector of shape (D,), which need not be finite."""
        check_shape(vector)
        m = num_sent(len(vector), self.rate)
        # Squares of very small or large entries would vanish or overflow.
        low, high = torch.aminmax(vector)
        unit = power_of_two(torch.maximum(-low, high))
        g, random = vector / unit, self._random(vector.device)
        x = torch.randn(g.shape, generator=random, device=g.device, dtype=g.dtype)
        norm2 = g.dot(g)
        # Given R g, the part of R orthogonal to g is still fresh: x made orthogonal to
        # g times ‖R g‖/√M; and ‖R g‖² is ‖g‖² χ²(M)/M.
        chi2 = torch.randn(m, generator=random, device=g.device, dtype=g.dtype).square()
        q = chi2.sum() / m
        along = torch.where(norm2 > 0, x.dot(g) / norm2, torch.zeros_like(norm2))
        across = (q * norm2 / m).sqrt()
        return ((q - across * along) * g + across * x) * unit

    def sent(self, vector: Tensor, step: int) -> Sequence[Tensor]:
        """z = R g, shape (M,)."""
        z = vector.new_zeros(num_sent(len(vector), self.rate))
        for rows, block in self._blocks(len(vector), step, vector):
            z += vector[rows] @ block
        return (z,)

    def recovered(self, parts: Sequence[Tensor], dim: int, step: int) -> Tensor:
        """Rᵀ z, shape (D,)."""
        (z,) = parts
        vector = z.new_empty(dim)
        for rows, block in self._blocks(dim, step, z):
            vector[rows] = block @ z
        return vector

    def state_dict(self) -> dict[str, Tensor]:
        """The next step and the generator's state, to draw the same noise again."""
        state = super().state_dict()
        if self._generator is not None:
            state["generator"] = self._generator.get_state()
        elif self._saved is not None:
            state["generator"] = self._saved.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the noise of a saved state; one from before any use starts it."""
        # States from before messages were counted have no step.
        super().load_state_dict({"step": torch.tensor(0), **state})
        if self._is_default:
            self._generator = None
        self._saved = state["generator"].cpu() if "generator" in state else None
        if self._generator is not None and self._saved is not None:
            _restore(self._generator, self._saved)

    def _random(self, device: torch.device) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(DEFAULT_SEED)
            if self._saved is not None:
                _restore(self._generator, self._saved)
        return self._generator

    def _blocks(
        self, dim: int, step: int, like: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Rᵀ of a step, a block of its D rows at a time."""
        random = self.random(step, like.device)
        m = num_sent(dim, self.rate)
        num_rows = max(1, BLOCK_NUMBERS // m)
        for start in range(0, dim, num_rows):
            rows = slice(start, min(start + num_rows, dim))
            block = torch.randn(
                rows.stop - rows.start,
                m,
                generator=random,
                device=like.device,
                dtype=like.dtype,
            )
            yield rows, block.mul_(m**-0.5)


def _restore(generator: torch.Generator, saved: Tensor) -> None:
    try:
        generator.set_state(saved)
    except RuntimeError as error:
        raise ValueError(
            f"the saved noise of a GaussianSketch was not drawn on {generator.device}, "
            "and other kinds of devices draw other numbers: resume where it was "
            f"saved, or leave 'generator' out of the state ({error})"
        ) from error
