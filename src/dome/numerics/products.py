"""What a batch of samples has in common with itself and with a basis.

Shapes: G (B, D) samples, μ (D,) their mean, H = G − 1 μᵀ, U (D, K) a basis. Everything
an update needs to know of D-dimensional things, in numbers that do not depend on D, in
float64; and the questions about them, each computed once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dome.numerics import passes
from dome.numerics.passes import Prepare, compute_dtype, multiply
from dome.numerics.shard import Shard
from dome.numerics.together import Steps, Sum

# ‖μ‖² over the mean of ‖h_b‖² from which samples are centred before anything else.
LONG_MEAN = 4.0
# Squared length beyond which float32, in which most bases are, may lose products.
FAR = torch.finfo(torch.float32).max ** 0.5


@dataclass(frozen=True, slots=True)
class Products:
    """Products of samples with each other and with U.

    Attributes:
        V: H U, centred samples in the basis, shape (B, K): the paper's V.
        m: Uᵀ μ, the mean in the basis, shape (K,).
        squares: ‖h_b‖², shape (B,).
        Hmu: H μ, shape (B,).
        mu2: ‖μ‖², a scalar.
        VHHV: Vᵀ H Hᵀ V, shape (K, K); zeros if not asked for.
        HHV: H Hᵀ V, shape (B, K); None where it is not known.
    """

    V: Tensor
    m: Tensor
    squares: Tensor
    Hmu: Tensor
    mu2: Tensor
    VHHV: Tensor
    HHV: Tensor | None = None

    @property
    def sample_norms_squared(self) -> Tensor:
        """‖g_b‖² of every sample, shape (B,)."""
        return self.squares + 2 * self.Hmu + self.mu2

    @property
    def energy(self) -> Tensor:
        """‖H‖²_F, the total variance in the batch times B."""
        return self.squares.sum()


class Combination(NamedTuple):
    """Some columns of Hᵀ V X as wideᵀ small; zero without.

    Attributes:
        columns: Which of the D.
        wide: Shape (n, D).
        small: Shape (n, K).
        prepare: What is done to a block of ``wide`` first.
    """

    columns: slice
    wide: Tensor | None = None
    small: Tensor | None = None
    prepare: Prepare = passes.as_they_are


class Samples(Protocol):
    """A batch of samples as a tracker sees it: rows, or anything that acts like them.

    A tracker never looks inside. It asks for products with its basis, decides by small
    matrices, and adds the combination Hᵀ V X to its basis.
    """

    def __len__(self) -> int:
        """B."""

    def products(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Products]:
        """Products with each other and with U = S Q."""

    def questions(self, seen: Products) -> tuple[Tensor, Tensor, Tensor]:
        """Is it finite; is it constant up to rounding; does it want more care?"""

    def careful(self, shard: Shard) -> Steps["Samples"]:
        """The same samples, for products that lose fewer digits and take longer."""

    def combinations(self, V: Tensor, X: Tensor) -> Iterator[Combination]:
        """Hᵀ V X, in pieces that together have every column once."""

    def coordinates(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Tensor]:
        """G U, shape (B, K)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples ``scale * rows``.

    Attributes:
        rows: Shape (B, D), the columns held here.
        scale: Factor on all of them.
        power: None multiplies rows as they are and centres the products, which saves
            two passes. Else a power of two that rows are multiplied by, and then
            centred, before anything else: for means or lengths that would cost digits.
    """

    rows: Tensor
    scale: float | Tensor = 1.0
    power: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def unit(self) -> Tensor | float:
        """What turns prepared rows into the samples, up to their mean."""
        return self.scale if self.power is None else self.scale / self.power

    def centered(self, block: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """A block of rows, multiplied and centred along ``dim``, where the B are."""
        block = self.multiplied(block, dtype)
        return block - block.mean(dim=dim, keepdim=True)

    def multiplied(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """A block of rows times ``power``, in ``dtype``."""
        if self.power is None:
            return block.to(dtype)
        # In the wider of the two: the power fits neither 16 bits, where these are what
        # rows have, nor what is left of float64 rows once they are float32.
        wider = torch.promote_types(block.dtype, dtype)
        return (block.to(wider) * self.power).to(dtype)

    def products(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Products]:
        """Products with each other and with U = S Q: see ``Samples``."""
        pairwise = is_pairwise(S.shape[1], len(self))
        seen, HH = yield from self.prepared_products(S, Q, shard, pairwise=pairwise)
        if HH is None:
            HHV = yield from self.action(seen.V, compute_dtype(S.dtype), shard)
        else:
            HHV = HH @ seen.V
        return in_units(seen, HHV, self.unit)

    def products_without_action(
        self, S: Tensor, Q: Tensor | None, shard: Shard
    ) -> Steps[Products]:
        """The same without H Hᵀ V and Vᵀ H Hᵀ V."""
        seen, _ = yield from self.prepared_products(S, Q, shard, pairwise=False)
        return in_units(seen, None, self.unit)

    def careful(self, shard: Shard) -> Steps["Rows"]:
        """The same samples, to be multiplied and centred first."""
        largest = yield from self.largest(shard)
        return Rows(self.rows, self.scale, power_for(largest, self.rows.dtype))

    def largest(self, shard: Shard) -> Steps[Tensor]:
        """The largest number in all rows, up to the number of workers."""
        largest = torch.zeros((), dtype=torch.float64, device=self.rows.device)
        if self.rows.numel():
            largest = torch.linalg.vector_norm(self.rows, torch.inf).double()
        # A sum over workers is no less than the maximum, and at most P times that.
        (largest,) = yield Sum(shard.total, (largest,))
        return largest

    def questions(self, seen: Products) -> tuple[Tensor, Tensor, Tensor]:
        """Is it finite; is it constant up to rounding; does it want more care?"""
        finite, constant, care = questions(seen, self.rows.dtype, self.scale)
        return finite, constant, care if self.power is None else torch.zeros_like(care)

    def combinations(self, V: Tensor, X: Tensor) -> Iterator[Combination]:
        """Hᵀ V X: see ``Samples``. V sums to zero over b, so that Gᵀ V = Hᵀ V."""
        small = self.unit * (V @ X)
        yield Combination(slice(None), self.rows, small, self._prepare)

    @property
    def _prepare(self) -> Prepare:
        return passes.as_they_are if self.power is None else self.centered

    def coordinates(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Tensor]:
        """G U, shape (B, K)."""
        (GS,) = yield Sum(shard.total, (multiply(self.rows, S),))
        return self.scale * (GS if Q is None else GS @ Q)

    def outside(
        self, S: Tensor, Q: Tensor | None, V: Tensor, shard: Shard
    ) -> Steps[tuple[Tensor, Tensor]]:
        """What the centred samples have outside U, formed explicitly, block by block.

            H⊥ = H − V Uᵀ,  returns  H⊥ U  and  H⊥ H⊥ᵀ

        The first is zero up to rounding and to the basis' own error, and corrects for
        both. Differences of the finished products, H Hᵀ − V Vᵀ, would have no correct
        digit left where the basis holds nearly all of H.
        """
        dtype, B = compute_dtype(S.dtype), len(self)
        correction, inner = torch.zeros_like(V), V.new_zeros(B, B)
        coords = ((V if Q is None else V @ Q.T) / self.unit).to(dtype)
        for rows in passes.row_blocks(S, B + S.shape[1]):
            basis = S[rows].to(dtype)
            rest = self.centered(self.rows[:, rows], 0, dtype)
            rest.addmm_(coords, basis.T, alpha=-1)
            correction += rest @ basis
            inner += rest @ rest.T
        correction = correction if Q is None else correction @ Q
        correction, inner = yield Sum(shard.total, (correction, inner))
        return correction * self.unit, inner * self.unit**2

    def prepared_products(
        self, S: Tensor, Q: Tensor | None, shard: Shard, *, pairwise: bool
    ) -> Steps[tuple[Products, Tensor | None]]:
        """Products of the prepared rows, and their H Hᵀ if it is asked for."""
        form = _products_then_center
        if self.power is not None:
            form = _center_then_products
        return form(S, Q, self, shard, pairwise)

    def action(
        self, V: Tensor, dtype: torch.dtype, shard: Shard, out: Tensor | None = None
    ) -> Steps[Tensor]:
        """H Hᵀ V of the prepared rows, Hᵀ V a block at a time, shape (B, K).

        Args:
            V: Shape (B, K).
            dtype: What is computed in.
            shard: Where other workers' columns are.
            out: Takes Vᵀ H, shape (K, D), if that is wanted.
        """
        total, small = torch.zeros_like(V), V.to(dtype)
        for rows in passes.row_blocks(self.rows.T, sum(V.shape)):
            block = self._prepare(self.rows[:, rows], 0, dtype)
            HtV = block.T @ small
            total += passes.sum_of_pieces(block, HtV)
            if out is not None:
                out[:, rows] = HtV.T
        (total,) = yield Sum(shard.total, (total,))
        return total - total.mean(dim=0)


def in_units(seen: Products, HHV: Tensor | None, unit: Tensor | float) -> Products:
    """Products of samples from those of prepared rows, which are ``unit`` times less.

    Args:
        seen: Products of the prepared rows.
        HHV: Their H Hᵀ V, if it is known.
        unit: What turns rows into samples.
    """
    V = unit * seen.V
    HHV = None if HHV is None else unit**3 * HHV
    return Products(
        V=V,
        m=unit * seen.m,
        squares=unit**2 * seen.squares,
        Hmu=unit**2 * seen.Hmu,
        mu2=unit**2 * seen.mu2,
        VHHV=seen.VHHV if HHV is None else V.T @ HHV,
        HHV=HHV,
    )


def power_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """A power of two that brings samples of a type to about one."""
    # Exponents that the precision of the rows has, and that of the basis at least.
    most = 1022 if dtype == torch.float64 else 126
    exponent = torch.frexp(largest)[1].clamp(-most, most)
    return torch.ldexp(torch.ones_like(largest), -exponent)


def questions(
    seen: Products, dtype: torch.dtype, scale: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Are samples finite; are they constant up to rounding; do they want more care?

    Args:
        seen: Products of the samples.
        dtype: Precision of their rows.
        scale: What rows were multiplied by to give the samples.
    """
    B, energy, mu2 = len(seen.V), seen.energy, seen.mu2
    # One infinite or missing value shows in all sums. Fourth powers of lengths are what
    # eigenvalues come from: samples of float64 may be finite where these are not.
    finite = (seen.V.sum() + energy.square() + mu2 + seen.VHHV.sum()).isfinite()
    too_small = energy.square() < torch.finfo(energy.dtype).tiny
    constant = too_small | (B * mu2 >= (4 * torch.finfo(dtype).eps) ** -2 * energy)
    # Squares leave the range of a precision long before the samples do.
    size = (energy / B + mu2) / scale**2
    care = ~finite | (size < 1 / FAR) | (size > FAR) | (B * mu2 >= LONG_MEAN * energy)
    return finite, constant, care


def is_pairwise(num_columns: int, num_samples: int) -> bool:
    """Whether H Hᵀ V is formed from H Hᵀ, 2 D B² flops, or in two steps, 4 D B K."""
    return num_samples <= 2 * num_columns


def _products_then_center(
    S: Tensor, Q: Tensor | None, samples: Rows, shard: Shard, pairwise: bool
) -> Steps[tuple[Products, Tensor | None]]:
    """The finished products are centred, not the samples."""
    G, dtype = samples.rows, compute_dtype(S.dtype)
    GU = multiply(G, S)
    if pairwise:
        own = [multiply(G, G.T, dtype)]
    else:
        mean = G.mean(dim=0)[:, None]
        own = [passes.squared_norms(G), multiply(G, mean, dtype)[:, 0]]
    GU, *own = yield Sum(shard.total, (GU if Q is None else GU @ Q, *own))
    squares, Gmu = (own[0].diagonal(), own[0].mean(dim=1)) if pairwise else own
    mu2 = Gmu.mean()
    HH = own[0] - Gmu[:, None] - Gmu + mu2 if pairwise else None
    seen = Products(
        V=GU - GU.mean(dim=0),
        m=GU.mean(dim=0),
        squares=squares - 2 * Gmu + mu2,
        Hmu=Gmu - mu2,
        mu2=mu2,
        VHHV=GU.new_zeros(S.shape[1], S.shape[1]),
    )
    return seen, HH


def _center_then_products(
    S: Tensor, Q: Tensor | None, samples: Rows, shard: Shard, pairwise: bool
) -> Steps[tuple[Products, Tensor | None]]:
    """The samples are multiplied and centred, a block of them at a time."""
    B, K, dtype = len(samples), S.shape[1], compute_dtype(S.dtype)
    coords = S.new_zeros(B + 1, K, dtype=torch.float64)
    inner = S.new_zeros(B + 1, B + 1 if pairwise else 1, dtype=torch.float64)
    squares = S.new_zeros(B, dtype=torch.float64)
    for rows in passes.row_blocks(S, B + K):
        block = samples.multiplied(samples.rows[:, rows], dtype)
        mean = block.mean(dim=0, keepdim=True)
        both = torch.cat([block - mean, mean])
        coords += passes.sum_of_pieces(both, S[rows].to(dtype))
        inner += both @ both[-inner.shape[1] :].T
        squares += passes.squared_norms(both[:B])
    coords = coords if Q is None else coords @ Q
    coords, inner, squares = yield Sum(shard.total, (coords, inner, squares))
    seen = Products(
        # Rounding leaves a mean of the order of the precision; H has none.
        V=coords[:B] - coords[:B].mean(dim=0),
        m=coords[B],
        squares=squares,
        Hmu=inner[:B, -1],
        mu2=inner[B, -1],
        VHHV=coords.new_zeros(K, K),
    )
    return seen, inner[:B, :B] if pairwise else None
