"""A batch of samples as a tracker sees it, and which batches are let in.

Shapes: G (B, D) samples, μ (D,) their mean, H = G − 1 μᵀ; U (D, K) a basis. Everything
that an update asks of D numbers comes down to products of B or K rows, in float64, on
the host. These are centred when they are small, which saves two passes over G. Where
the mean is long, or where squares leave the range of a precision, that would cost
digits: such samples are multiplied by a power of two and centred first, ``carefully``.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Integral
from typing import TYPE_CHECKING, SupportsFloat

import torch
from torch import Tensor

from dome.trackers.linalg import (
    Shard,
    block_rows,
    compute_dtype,
    product,
    squared_norms,
)
from dome.trackers.parts import Part, PartialRows, parts_of, pieces
from dome.trackers.protocol import Sums

if TYPE_CHECKING:
    from dome.trackers.basis import FactoredBasis

# ‖μ‖² over the mean of ‖h_b‖² from which samples are centred before anything else.
LONG_MEAN = 4.0
# Squared length beyond which float32, in which most bases are, may lose products.
FAR = torch.finfo(torch.float32).max ** 0.5
MIN_SAMPLES = 2  # one sample has no centred covariance


@dataclass(frozen=True, slots=True)
class Seen:
    """Products of a batch with itself and with a basis, on the host.

    Attributes:
        V: H U, centred samples in the basis, shape (B, K): the paper's V.
        m: Uᵀ μ, the mean in the basis, shape (K,).
        VHHV: Vᵀ H Hᵀ V, shape (K, K); zeros where it was not asked for.
        HHV: H Hᵀ V, shape (B, K); None where it is not known.
        Hmu: H μ, shape (B,).
        mu2: ‖μ‖², a scalar.
        totals: ‖g_b‖² of every sample, shape (B,).
        energy: ‖H‖²_F, the total variance in the batch times B, a scalar.
        is_finite: Whether all samples are, and all that eigenvalues come from.
        is_constant: Whether all samples are the same, up to rounding.
        wants_care: Whether digits were lost, unless this is with care already.
    """

    V: Tensor
    m: Tensor
    VHHV: Tensor
    HHV: Tensor | None
    Hmu: Tensor
    mu2: Tensor
    totals: Tensor
    energy: Tensor
    is_finite: bool
    is_constant: bool
    wants_care: bool


def judged(
    V: Tensor,
    m: Tensor,
    VHHV: Tensor,
    HHV: Tensor | None,
    Hmu: Tensor,
    mu2: Tensor,
    squares: Tensor,
    *,
    rounding: float,
    scale: Tensor,
) -> Seen:
    """What was seen, with the answers to what is asked of any batch.

    Letters are those of ``Seen``; ``squares`` are ‖h_b‖² (B,), ``rounding`` is the
    relative precision of rows, which times ``scale`` are the samples.
    """
    energy, B = squares.sum(), len(V)
    # One infinite or missing value shows in all sums; samples of float64 may be finite
    # where fourth powers of their lengths are not.
    finite = math.isfinite(V.sum() + energy.square() + mu2 + VHHV.sum())
    too_small = energy.square() < torch.finfo(torch.float64).tiny
    constant = too_small | (B * mu2 >= (4 * rounding) ** -2 * energy)
    # Squares leave the range of a precision long before the samples do.
    size = float((energy / B + mu2) / scale.square())
    is_long = B * mu2 >= LONG_MEAN * energy
    care = not finite or not 1 / FAR <= size <= FAR or bool(is_long)
    totals = squares + 2 * Hmu + mu2
    answers = finite, bool(constant), care
    return Seen(V, m, VHHV, HHV, Hmu, mu2, totals, energy, *answers)


class Samples:
    """The samples ``scale * rows``.

    Args:
        rows: Shape (B, D), the columns held here; or parts of them.
        scale: Factor on all of them.
    """

    def __init__(self, rows: Tensor | PartialRows, scale: float = 1.0) -> None:
        self.parts = parts_of(rows)
        self._precision = self.parts[0].rows.dtype
        self._scale = self._unit = torch.tensor(scale, dtype=torch.float64)
        # What was taken out of the rows; None where they are as they came.
        self._mean: tuple[Part, ...] | None = None
        self.are_careful = False  # whether rows were multiplied and centred first

    def __len__(self) -> int:
        return len(self.parts[0].rows)

    @property
    def _device(self) -> torch.device:
        return self.parts[0].rows.device

    def carefully(self, shard: Shard, dtype: torch.dtype) -> "Samples":
        """The same, multiplied and centred, in the precision of a basis."""
        largest = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in self.parts:
            if part.rows.numel():
                longest = torch.linalg.vector_norm(part.rows, torch.inf).double()
                # A number that is not finite is larger than all others.
                largest = torch.maximum(largest, longest)
        # A sum over workers is no less than the maximum, and at most P times that.
        (largest,) = shard.total(largest)
        most = 1022 if self._precision == torch.float64 else 126
        exponent = math.frexp(float(largest))[1]
        power = math.ldexp(1.0, -max(-most, min(most, exponent)))
        # In the wider precision: the power fits neither 16 bits, where these are what
        # rows have, nor what is left of float64 rows once they are float32.
        own = compute_dtype(dtype)
        wide = torch.promote_types(self._precision, own)
        centred, mean = [], []
        for part in self.parts:
            H = part.rows.to(wide, copy=True).mul_(power)
            mu = H.mean(dim=0, keepdim=True)
            centred.append(part._replace(rows=H.sub_(mu).to(own)))
            mean.append(part._replace(rows=mu.to(own)))
        result = Samples(PartialRows(tuple(centred)))
        result._precision, result._mean = self._precision, tuple(mean)
        result._scale, result._unit = self._scale, self._scale / power
        result.are_careful = True
        return result

    def look(self, U: "FactoredBasis", *, pairwise: bool) -> Sums:
        """G U, and G Gᵀ or what is needed of it: sums over all D."""
        dtype = U.compute_dtype
        sums = {"GU": U.inner(self.parts)}
        if pairwise:
            sums["GG"] = _sum(product(G, G.T, dtype) for G, *_ in self.parts)
        else:
            sums["squares"] = _sum(squared_norms(G) for G, *_ in self.parts)
            wide = torch.promote_types(self._precision, dtype)
            means = [(G, G.mean(dim=0, dtype=wide)) for G, *_ in self.parts]
            sums["Gmu"] = _sum(product(G, mu[:, None], dtype)[:, 0] for G, mu in means)
        if self._mean is not None:
            pairs = list(zip(self.parts, self._mean, strict=True))
            sums["muU"] = U.inner(self._mean)[0]
            sums["mu2"] = _sum(squared_norms(mu.rows)[0] for mu in self._mean)
            sums["Hmu"] = _sum(product(G.rows, mu.rows.T)[:, 0] for G, mu in pairs)
        return sums

    def act(self, U: "FactoredBasis", sums: Sums) -> Sums:
        """G Gᵀ V (B, K), where G Gᵀ would take more flops: a sum over all D."""
        V, dtype = sums["GU"] - sums["GU"].mean(dim=0), U.compute_dtype
        total, small = torch.zeros_like(V), V.to(dtype)
        for part in pieces(self.parts, block_rows(sum(V.shape), self._device)):
            block = part.rows.to(dtype)
            total += block @ (block.T @ small)
        return {"GGV": total}

    def seen(self, sums: Sums) -> Seen:
        """What was found, centred, and in the samples' own units."""
        GU, u = sums["GU"], self._unit
        m = GU.mean(dim=0)
        V, HHV = GU - m, None
        if "GG" in sums:
            GG = sums["GG"]
            squares, Gmu = GG.diagonal(), GG.mean(dim=1)
            HHV = (GG - Gmu[:, None] - Gmu + Gmu.mean()) @ V
        else:
            squares, Gmu = sums["squares"], sums["Gmu"]
        if "GGV" in sums:
            HHV = sums["GGV"] - sums["GGV"].mean(dim=0)
        mu2 = Gmu.mean()
        squares, Hmu = squares - 2 * Gmu + mu2, Gmu - mu2
        if self.are_careful:  # and what the rows have left of a mean is rounding
            m, Hmu, mu2 = sums["muU"], sums["Hmu"], sums["mu2"]
        V, m = u * V, u * m
        VHHV = torch.zeros(V.shape[1], V.shape[1], dtype=V.dtype)
        if HHV is not None:
            HHV = u**3 * HHV
            VHHV = V.T @ HHV
        rounding = torch.finfo(self._precision).eps
        own = u**2 * Hmu, u**2 * mu2, u**2 * squares
        return judged(V, m, VHHV, HHV, *own, rounding=rounding, scale=self._scale)

    def in_units(self, once: Tensor, twice: Tensor) -> tuple[Tensor, Tensor]:
        """What was formed of the rows, once and with themselves, of the samples."""
        return self._unit * once, self._unit**2 * twice

    def mirrored(self, num_parts: int, dtype: torch.dtype) -> Iterator["Samples"]:
        """The batch in parts, each centred on the mean of all; (h, −h)/√2 for each h.

        A part's own mean then is variance too, which mirrored rows keep: theirs is
        zero.

        Args:
            num_parts: How many.
            dtype: What they are centred in, or the precision of the rows if wider.
        """
        wide = torch.promote_types(self._precision, dtype)
        means = []
        for part in self.parts:
            split = part.rows.tensor_split(num_parts)
            sums = torch.stack([some.sum(dim=0, dtype=wide) for some in split])
            means.append(sums.sum(dim=0) / len(self))
        for i in range(num_parts):
            mirrored = []
            for part, mean in zip(self.parts, means, strict=True):
                some = part.rows.tensor_split(num_parts)[i]
                rows = (some.to(wide) - mean) * 0.5**0.5
                mirrored.append(part._replace(rows=torch.cat([rows, -rows])))
            result = Samples(PartialRows(tuple(mirrored)))
            result._scale, result._unit = self._scale, self._unit
            yield result

    def combination(self, V: Tensor, X: Tensor) -> tuple[Sequence[Part], Tensor]:
        """Hᵀ V X as wideᵀ small. V sums to zero over b, so that Gᵀ V = Hᵀ V."""
        return self.parts, self._unit * (V @ X)

    def coordinates(self, U: "FactoredBasis") -> Tensor:
        """G U: a sum over all D, shape (B, K)."""
        GU = self._unit * U.inner(self.parts)
        if self._mean is None:
            return GU
        return GU + self._unit * U.inner(self._mean)


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """Of at least one."""
    return reduce(torch.add, parts)


def check_whole(**values: object) -> None:
    """Refuse what is no whole number, by its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_forget(forget: object) -> None:
    """Refuse what is no weight of the newest batch."""
    if forget is None or (isinstance(forget, SupportsFloat) and 0 < float(forget) < 1):
        return
    raise ValueError(
        f"forget must be None (average over all batches) or lie strictly between 0 and "
        f"1, got {forget!r}"
    )


class Intake:
    """Checks batches, counts them, and weighs the newest against the past.

    Args:
        dim: Number of columns D that samples must have.
        rank: Number of directions that will be removed.
        oversample: Number of directions that are tracked besides.
        forget: None for the average over all batches, or the weight of the newest.
        shard: The columns that samples have here, if other workers hold the others.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        oversample: int,
        forget: float | None,
        shard: Shard | None,
    ) -> None:
        check_whole(dim=dim, rank=rank, oversample=oversample)
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        if not 1 <= rank <= dim:
            raise ValueError(
                f"rank must be between 1 and the number of parameters {dim}, got {rank}"
            )
        if oversample < 0:
            raise ValueError(f"oversample must not be negative, got {oversample}")
        check_forget(forget)
        if shard is not None and shard.dim != dim:
            raise ValueError(f"the shard is one of {shard.dim} rows, dim is {dim}")
        self.shard = Shard.whole(dim) if shard is None else shard
        self.num_columns = rank + min(oversample, dim - rank)
        self._forget, self._num_rows = forget, self.shard.num_rows
        self.num_updates = 0
        self.num_skipped = 0

    def weights(self, t: int | None = None) -> tuple[float, float]:
        """Weights of the past and of batch t, the last let in: (t − 1)/t and 1/t."""
        t = self.num_updates if t is None else t
        newest = 1 / t  # the first batch has no past
        if self._forget is not None and t > 1:
            newest = self._forget
        return 1 - newest, newest

    def check(self, grads: Tensor | PartialRows) -> None:
        """Refuse samples that are no batch (B, D) of numbers."""
        num = self._num_rows
        if len(grads.shape) != 2 or grads.shape[1] != num:
            raise ValueError(
                f"samples must have shape (B, {num}), one gradient per row, got "
                f"{tuple(grads.shape)}"
            )
        if not grads.dtype.is_floating_point:
            raise ValueError(f"samples must be floating point, got {grads.dtype}")

    def admits(self, num_samples: int) -> bool:
        """Whether a batch is large enough; one that is not is counted."""
        if num_samples < MIN_SAMPLES:
            self._skip("a batch of one sample has no covariance")
        return num_samples >= MIN_SAMPLES

    def accepts(self, is_finite: bool) -> bool:
        """Whether a batch is let in; either way it is counted."""
        if not is_finite:
            self._skip("a sample is not finite")
            return False
        self.num_updates += 1
        return True

    def _skip(self, reason: str) -> None:
        """Count a batch that was left out, and say so the first time."""
        self.num_skipped += 1
        if self.num_skipped == 1:
            warnings.warn(
                f"dome left a batch out of the basis: {reason}. Further ones are "
                f"counted in skipped_updates without a warning.",
                RuntimeWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Counters as tensors."""
        return {
            "num_updates": torch.tensor(self.num_updates),
            "num_skipped": torch.tensor(self.num_skipped),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the counters back."""
        self.num_updates = int(state["num_updates"])
        self.num_skipped = int(state["num_skipped"])
