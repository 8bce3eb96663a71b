"""What a spectrum says about how many directions matter.

Letters: eigenvalues λ₁ ≥ λ₂ ≥ ..., C classes. A spectrum has a knee where directions
stand out of the rest: on logarithmic axes of both λ and its index a straight line is
fitted to the second half, the bulk, and the directions before the knee lie above it. A
power law is that line itself, and has no knee; nor has a spectrum that falls ever
faster.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

OUTLIER = 2.0  # times the bulk's line
NEAR = 2.0  # a knee within this factor of C or C² is taken for it


@dataclass(frozen=True, slots=True)
class Eigengap:
    """The largest ratio of an eigenvalue to the next.

    Attributes:
        index: How many eigenvalues there are before the gap.
        ratio: λ_index / λ_(index + 1).
    """

    index: int
    ratio: float


@dataclass(frozen=True, slots=True)
class SuggestedRank:
    """How many directions to remove.

    Attributes:
        rank: The number.
        source: "C", "C^2", "knee" or "entropy rank": where it comes from.
        knee: How many directions stand out; None if there is no knee.
        why: The same in words.
    """

    rank: int
    source: str
    knee: int | None
    why: str

    def __str__(self) -> str:
        return self.why


def entropy_rank(eigenvalues: Tensor) -> float:
    """Over how many directions variance is spread.

        exp(−Σ pᵢ log pᵢ),  pᵢ = λᵢ / Σ λ

    The "effective rank" of Roy and Vetterli (2007). ``.stats.effective_rank`` is
    something else: how many directions samples have determined.

    Args:
        eigenvalues: Not negative, shape (K,). All equal, it is K; one alone, 1.
    """
    p = _checked(eigenvalues)
    p = p[p > 0] / p.sum()
    return math.exp(float(-(p * p.log()).sum())) if len(p) else 0.0


def effective_rank(eigenvalues: Tensor) -> float:
    """The old name of ``entropy_rank``."""
    warnings.warn(
        "diagnostics.effective_rank is called entropy_rank now: .stats has another "
        "effective_rank, how many directions samples have determined",
        DeprecationWarning,
        stacklevel=2,
    )
    return entropy_rank(eigenvalues)


def eigengap(eigenvalues: Tensor) -> Eigengap:
    """Where the largest ratio of neighbours is, among those that are positive.

    The last few of a sample covariance fall off towards zero by themselves: give the
    first half of a full spectrum.

    Args:
        eigenvalues: In any order, shape (K,), at least two of them positive.
    """
    values = _positive(eigenvalues)
    ratios = values[:-1] / values[1:]
    index = int(ratios.argmax())
    return Eigengap(index + 1, float(ratios[index]))


def knee(eigenvalues: Tensor) -> int | None:
    """How many eigenvalues stand out before the knee; None if there is no knee.

    Args:
        eigenvalues: In any order, shape (K,), at least two of them positive. As for
            ``eigengap``, give the first half of a full spectrum. No more than half of
            those given can stand out.
    """
    values = _positive(eigenvalues)
    half = len(values) // 2
    x = torch.arange(1, len(values) + 1, dtype=torch.float64).log()
    y = values.log()
    a, b = _line(x[half:], y[half:])
    above = (y - a * x - b)[:half] > math.log(OUTLIER)
    return int(above.nonzero().max()) + 1 if above.any() else None


def slope_of(variances: Tensor) -> float:
    """Slope of a line through all on logarithmic axes: −p of a power law j^−p.

    Args:
        variances: In the order of their directions, shape (K,). Sorting held-out ones
            would make a slope of their noise.
    """
    values = _checked(variances)
    x = torch.arange(1, len(values) + 1, dtype=torch.float64).log()
    positive = values > 0
    return _line(x[positive], values[positive].log())[0]


def suggest_rank(eigenvalues: Tensor, num_classes: int | None = None) -> SuggestedRank:
    """How many directions to remove. Deprecated: ``dome.suggest`` says it.

    It judges on samples that the eigenvalues do not come from. For the arguments and
    the rule here see ``rank_of``.
    """
    warn_of_suggest("suggest_rank")
    return rank_of(eigenvalues, num_classes)


def warn_of_suggest(name: str) -> None:
    """Say that ``dome.suggest`` has taken the place of a function."""
    warnings.warn(
        f"{name} is replaced by dome.suggest, which judges on batches that the basis "
        f"has not seen",
        DeprecationWarning,
        stacklevel=3,
    )


def rank_of(eigenvalues: Tensor, num_classes: int | None = None) -> SuggestedRank:
    """How many directions to remove: C, C², or as many as stand out.

    The knee decides. It is rounded to C or C² where it is within a factor of two of
    one of them, because a knee is not sharp. Without a knee it is the paper's C², or C
    where so many eigenvalues are not known; without classes the entropy rank.

    Args:
        eigenvalues: Of the centred covariance, in any order, shape (K,); the first half
            of a full spectrum.
        num_classes: C, if it is a classification.
    """
    if num_classes is not None and num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    found, known = knee(eigenvalues), len(eigenvalues)
    choices = {} if num_classes is None else {"C": num_classes, "C^2": num_classes**2}
    choices = {name: rank for name, rank in choices.items() if rank <= known}
    if found is None:
        spread = {"entropy rank": max(1, round(entropy_rank(eigenvalues)))}
        name, rank = max((choices or spread).items(), key=lambda item: item[1])
        why = f"{rank}, the {name}" if not choices else f"{rank} = {name}"
        why += f", for lack of a knee among {known} eigenvalues"
        return SuggestedRank(rank, name, None, why)
    near = {name: abs(math.log(rank / found)) for name, rank in choices.items()}
    name = min(near, key=near.__getitem__, default="")
    if name and near[name] <= math.log(NEAR):
        why = f"{choices[name]} = {name}, near the knee at {found}"
        return SuggestedRank(choices[name], name, found, why)
    why = f"{found}, the knee of the spectrum"
    return SuggestedRank(found, "knee", found, why)


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """a and b of the least-squares line y = a x + b; flat through a single point."""
    deviation = x - x.mean()
    spread = float(deviation.square().sum())
    a = float((deviation * y).sum()) / spread if spread > 0 else 0.0
    return a, float(y.mean()) - a * float(x.mean())


def _positive(eigenvalues: Tensor) -> Tensor:
    """The positive ones, largest first."""
    values = _checked(eigenvalues).sort(descending=True).values
    values = values[values > 0]
    if len(values) < 2:
        raise ValueError(
            f"{len(values)} of {len(eigenvalues)} eigenvalues are positive, and a "
            f"spectrum needs two: take more samples, or wait for the first update"
        )
    return values


def _checked(eigenvalues: Tensor) -> Tensor:
    values = eigenvalues.detach().double().cpu()
    if values.dim() != 1 or not values.isfinite().all() or (values < 0).any():
        raise ValueError(
            f"eigenvalues must be finite numbers of shape (K,), none negative, got "
            f"{values}"
        )
    return values
