"""``suggest``: is the filter worth it here, with which rank, and what does it save?

An unbiased compressor C with E‖C(g) − g‖² = ω ‖g‖² adds noise in proportion to the
square of what is sent. The filter sends kept_norm ‖g‖: for as much noise as without it,
ω may be 1 / kept_norm² times larger.

The rule for the rank looks at the variance that batches have along each direction that
other batches gave, on logarithmic axes:

    some above twice the line through the smaller half      as many as stand out
    none, and it falls more slowly than j^−0.3              none: do not filter
    none, but it falls faster: a power law has no edge      what the budget allows
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dome.diagnostics.rank import knee, slope_of
from dome.parameters import Layout
from dome.planning.memory import available_memory
from dome.planning.training import Choice, plan
from dome.planning.units import size
from dome.planning.watching import Judge, Judged, SampleBatches, learned, untouched
from dome.samples.calls import LossFn
from dome.samples.tracing.inputs import check_names, declared
from dome.samples.tracing.nested import Value
from dome.trackers.blocks import Blockwise
from dome.trackers.samples import check_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = (1, 2, 5, 10, 20, 50, 100, 200)
LAYOUTS: tuple[tuple[str, int | None], ...] = (
    ("global", None),
    ("layerwise", None),
    ("global", 4),
)
FLAT = -0.3  # slope above which a spectrum counts as flat
LEAST_GAIN = 1.1  # factor below which the filter is not worth its time
FEWEST_BATCHES = 4
FEWEST_DIRECTIONS = 4  # that a line can be fitted to
COPIES = 5  # of the basis: of two layouts, and three written out


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a filter of one layout and rank would do, judged on held-out batches.

    Attributes:
        layout: "global" or "layerwise".
        direction_rank: Rank of each direction in each weight; None: as they are.
        rank: Directions K, of each layer if layer-wise.
        share: Of the samples' variance, what the directions hold.
        kept_norm: ‖filtered g‖ / ‖g‖, root of the mean square over batches.
        kept_interval: 95 % of it.
        factor: 1 / mean of kept_norm²: how many times the noise of an unbiased
            compressor falls behind the filter.
        factor_interval: 95 % of it.
        noise_scale_inside: tr Σ / ‖μ‖² of what is removed, in samples.
        noise_scale_outside: The same of what is kept.
        memory: Bytes that ``dome.plan`` predicts.
        seconds: Of a step, as ``dome.plan`` predicts.
        fits: Whether the memory is available.
    """

    layout: str
    direction_rank: int | None
    rank: int
    share: float
    kept_norm: float
    kept_interval: tuple[float, float]
    factor: float
    factor_interval: tuple[float, float]
    noise_scale_inside: float
    noise_scale_outside: float
    memory: int
    seconds: float
    fits: bool

    @property
    def name(self) -> str:
        """The layout in a few words."""
        if self.direction_rank is None:
            return self.layout
        return f"direction_rank={self.direction_rank}"

    @property
    def options(self) -> str:
        """What to pass to ``attach`` for it."""
        words = [f"rank={self.rank}"]
        if self.layout != "global":
            words.append(f'layout="{self.layout}"')
        if self.direction_rank is not None:
            words.append(f"direction_rank={self.direction_rank}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What ``suggest`` found.

    Attributes:
        dim: Parameters D.
        num_learned: Samples that bases were learned on.
        num_judged: Samples that they were judged on.
        candidates: One for each layout and rank.
        spectrum: Held-out variance along each direction of the global basis, in the
            order of the basis.
        edge: How many directions stand out; None without an edge.
        slope: Of the spectrum on logarithmic axes: −p where it falls like j^−p.
        noise_scale: tr Σ / ‖μ‖² of the whole gradient, in samples.
        choice: The candidate that is suggested; None for no filter.
    """

    dim: int
    num_learned: int
    num_judged: int
    candidates: tuple[Candidate, ...]
    spectrum: tuple[float, ...]
    edge: int | None
    slope: float
    noise_scale: float
    choice: Candidate | None

    @property
    def rank(self) -> int | None:
        """The rank that is suggested; None for no filter."""
        return None if self.choice is None else self.choice.rank

    @property
    def sentence(self) -> str:
        """The same in plain words."""
        rank = len(self.spectrum) if self.edge is None else self.edge
        best = next(c for c in self.candidates if c.rank == rank)
        if self.choice is None and self.edge is None and self.slope > FLAT:
            return (
                f"do not use dome here: nothing stands out. The {len(self.spectrum)} "
                f"directions that were looked at have nearly the same variance"
            )
        if self.choice is None:
            return (
                f"do not use dome here: {best.rank} directions ({best.name}) allow "
                f"{best.factor:.2f} times harder compression, and "
                f"{LEAST_GAIN} is the least that is worth it"
            )
        chosen = self.choice
        low, high = chosen.factor_interval
        edge = (
            f"no edge, the variance falls like j^{self.slope:.1f}: {chosen.rank} "
            f"directions, as many as memory and samples allow,"
            if self.edge is None
            else f"{chosen.rank} directions stand out and"
        )
        return (
            f"{edge} hold {chosen.share:.0%} of the samples' variance. Behind the "
            f"filter an unbiased compressor may compress {chosen.factor:.1f} times "
            f"harder [{low:.1f}, {high:.1f}] at equal noise: "
            f"dome.attach(model, optimizer, {chosen.options})"
        )

    @property
    def forecasts(self) -> Mapping[str, str]:
        """By compressor: what as much noise as without the filter allows."""
        if self.choice is None:
            return {}
        return forecasts(self.choice.factor)

    def __str__(self) -> str:
        lines = [
            f"{self.dim:,} parameters; learned on {self.num_learned:,} samples, judged "
            f"on {self.num_judged:,} others; noise scale {self.noise_scale:,.0f} "
            "samples",
            f"{'layout':<17}{'rank':>5}{'share':>7}{'kept norm':>19}"
            f"{'x harder':>10}{'memory':>9}{'a step':>10}",
        ]
        for c in self.candidates:
            low, high = c.kept_interval
            kept = f"{c.kept_norm:.2f} [{low:.2f}, {high:.2f}]"
            lines.append(
                f"{c.name:<17}{c.rank:>5}{c.share:>7.0%}{kept:>19}{c.factor:>10.1f}"
                f"{size(c.memory):>9}{c.seconds * 1e3:>7.1f} ms"
                + ("" if c.fits else "  does not fit")
            )
        lines += [f"{name}: {words}" for name, words in self.forecasts.items()]
        return "\n".join([*lines, self.sentence])

    def draw(self) -> "Figure":
        """One picture: the spectrum, and the factor by rank. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(
                "a picture needs matplotlib: pip install 'dome-torch[lab]', or print "
                "the suggestion instead"
            ) from None
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        places = range(1, len(self.spectrum) + 1)
        left.loglog(places, self.spectrum, ".-")
        if self.edge is not None:
            left.axvline(self.edge + 0.5, linestyle="--", color="grey")
        left.set(xlabel="direction", ylabel="variance on held-out batches")
        for name in dict.fromkeys(c.name for c in self.candidates):
            own = [c for c in self.candidates if c.name == name]
            ranks, factors = [c.rank for c in own], [c.factor for c in own]
            right.plot(ranks, factors, ".-", label=name)
            low, high = zip(*(c.factor_interval for c in own), strict=True)
            right.fill_between(ranks, low, high, alpha=0.2)
        right.set(xscale="log", xlabel="rank", ylabel="times harder at equal noise")
        right.legend()
        return figure


def forecasts(factor: float) -> dict[str, str]:
    """What a compressor's setting may become where the filter sends less.

    Args:
        factor: 1 / mean of kept_norm².
    """
    bits = math.log2(factor) if factor > 0 else math.nan
    return {
        "GaussianSketch, HadamardSketch": f"rate R → {factor:.1f} R",
        "RandomK": f"rate R → 1 + {factor:.1f} (R − 1)",
        "QSGD": f"1/{factor:.1f} of the levels while they are few ({bits:.1f} bits "
        f"fewer a number), 1/{factor**0.5:.1f} while they are many",
        "TernGrad": f"has no rate: {factor:.1f} times less noise in as many bytes",
        "TopK, SignSGD, PowerSGD, ErrorFeedback": "biased: measure it",
    }


def suggest(
    model: nn.Module,
    loss_fn: LossFn | None,
    loader: Iterable[Value],
    batches: int = 50,
    *,
    memory: int | None = None,
    samples_in: str | Sequence[str] | None = None,
) -> Suggestion:
    """Watch some batches, and say which rank to filter with and what that saves.

    Nothing is trained or changed: weights, ``.grad``, buffers, and the generators of
    torch, NumPy, Python and a ``DataLoader`` are as before. Bases are learned on the
    first half of the batches and judged on the other. What is found holds for the
    weights that the model has now: ask again once it is trained a little.

    Args:
        model: The model that will be trained; batch norm in training mode is refused.
        loss_fn: Maps predictions and targets to a scalar mean; None if the model
            returns its loss.
        loader: A ``DataLoader`` or a list of batches: ``(x, y)``, ``(x1, x2, y)``, a
            dictionary of named inputs, or what else ``dome.verify`` takes.
        batches: How many batches to look at, at least four.
        memory: Bytes that the filter may take; half of what is free if not given.
        samples_in: Which inputs hold samples, as in ``dome.attach``.
    """
    _check(loader, batches, memory)
    names = declared(samples_in)
    check_names(model, names)
    layout = Layout(model)
    budget = available_memory(layout.device) // 2 if memory is None else memory
    with untouched(model, loader):
        seen = SampleBatches(model, loss_fn, loader, batches, names)
        trackers, num_learned, B, rest = _learn(model, seen, batches, budget)
        judges = [Judge(tracker) for tracker in trackers]
        del trackers
        for G in rest:
            for judge in judges:
                judge.see(G)
    judged = [judge.verdict() for judge in judges]
    if len(judged[0].num_samples) < FEWEST_BATCHES // 2:
        raise ValueError(_too_few(len(judged[0].num_samples)))
    if not float(judged[0].spread) > 0:
        raise ValueError(
            "the samples of each batch are all the same: there is nothing to remove"
        )
    return _suggested(model, judged, num_learned, B, budget, seen.positions)


def _check(loader: object, batches: int, memory: int | None) -> None:
    check_whole(batches=batches)
    if batches < FEWEST_BATCHES:
        raise ValueError(
            f"batches must be at least {FEWEST_BATCHES}, half to learn from and half "
            f"to judge by, got {batches}"
        )
    if iter_is_itself(loader):
        raise ValueError(
            f"loader is {type(loader).__name__}, whose batches would be missing in "
            f"training: give a DataLoader, or a list of some batches"
        )
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be at least 1 byte, got {memory}")


def iter_is_itself(loader: object) -> bool:
    """Whether something can be walked over only once."""
    return hasattr(loader, "__next__")


def _too_few(found: int) -> str:
    return (
        f"the loader ended with {found} batches to judge by: give at least "
        f"{FEWEST_BATCHES} batches, or a smaller number as batches="
    )


def _learn(
    model: nn.Module, seen: SampleBatches, batches: int, budget: int
) -> tuple[list[Blockwise], int, int, Iterable[Tensor]]:
    """Trackers that have seen the first half; samples so far, B, and the other half."""
    trackers: list[Blockwise] = []
    num_learned = num_seen = B = 0
    rest = iter(seen)
    length = seen.length
    half = (batches if length is None else min(batches, length)) // 2
    for G in rest:
        if not trackers:
            B = len(G)
            rank = _largest(model, B, half, budget)
            trackers = [learned(model, rank, *way) for way in LAYOUTS]
        for tracker in trackers:
            tracker.update(G)
        num_learned, num_seen = num_learned + len(G), num_seen + 1
        if num_seen == half:
            break
    if num_seen < max(half, FEWEST_BATCHES // 2):
        raise ValueError(_too_few(0))
    return trackers, num_learned, B, rest


def _largest(model: nn.Module, B: int, half: int, budget: int) -> int:
    """The largest rank that memory and the samples allow."""
    layout = Layout(model)
    number = layout.dtype.itemsize * layout.dim
    by_memory = (budget - 2 * B * number) // (COPIES * number)
    rank = min(RANKS[-1], layout.dim - 1, half * (B - 1), by_memory)
    if rank >= FEWEST_DIRECTIONS:
        return int(rank)
    if by_memory < FEWEST_DIRECTIONS:
        needed = (2 * B + COPIES * FEWEST_DIRECTIONS) * number
        raise ValueError(
            f"{B} samples of {layout.dim:,} parameters and {FEWEST_DIRECTIONS} "
            f"directions take {size(needed)}, and there are {size(budget)}: give "
            f"smaller batches, or more as memory="
        )
    raise ValueError(
        f"batches of {B} samples of {layout.dim} parameters determine {max(rank, 0)} "
        f"directions, and {FEWEST_DIRECTIONS} are needed: give more or larger batches"
    )


def _suggested(
    model: nn.Module,
    judged: Sequence[Judged],
    num_learned: int,
    B: int,
    budget: int,
    positions: int,
) -> Suggestion:
    variances = judged[0].spread_inside[0]
    edge, slope, known = knee(variances), slope_of(variances), len(variances)
    ranks = {k for k in RANKS if k <= known} | ({edge} if edge else {known})
    found: list[Candidate] = []
    plans = {
        k: plan(model, k, B, positions=positions, memory=budget).choices
        for k in sorted(ranks)
    }
    for way, judge in zip(LAYOUTS, judged, strict=True):
        for k, planned in plans.items():
            found.append(_candidate(way, k, judge, _choice(planned, way)))
    sizes = judged[0].num_samples
    return Suggestion(
        dim=Layout(model).dim,
        num_learned=num_learned,
        num_judged=sum(sizes),
        candidates=tuple(found),
        spectrum=tuple((variances / (sum(sizes) - len(sizes))).tolist()),
        edge=edge,
        slope=slope,
        noise_scale=judged[0].noise_scale(),
        choice=_best(found, edge, slope, known),
    )


def _best(
    found: Sequence[Candidate], edge: int | None, slope: float, known: int
) -> Candidate | None:
    """By the rule; the first layout whose memory fits."""
    if edge is None and slope > FLAT:
        return None
    rank = known if edge is None else edge
    fitting = [c for c in found if c.rank == rank and c.fits]
    fitting = [c for c in fitting if c.layout == "global"] or fitting
    best = fitting[0] if fitting else None
    return best if best is not None and best.factor >= LEAST_GAIN else None


def _candidate(
    way: tuple[str, int | None], rank: int, judged: Judged, planned: Choice
) -> Candidate:
    squares = judged.kept_squares(rank)
    mean, low, high = interval(squares.tolist())
    inside, outside = judged.noise_scales(rank)
    return Candidate(
        layout=way[0],
        direction_rank=way[1],
        rank=rank,
        share=judged.share(rank),
        kept_norm=mean**0.5,
        kept_interval=(low**0.5, high**0.5),
        factor=_inverse(mean),
        factor_interval=(_inverse(high), _inverse(low)),
        noise_scale_inside=inside,
        noise_scale_outside=outside,
        memory=planned.memory,
        seconds=planned.seconds,
        fits=planned.fits,
    )


def _inverse(x: float) -> float:
    return 1 / x if x > 0 else math.inf


def _choice(planned: Sequence[Choice], way: tuple[str, int | None]) -> Choice:
    """What ``plan`` says of a layout, stored as it is."""
    layout, direction_rank = way
    return next(
        c
        for c in planned
        if (c.layout, c.direction_rank) == (layout, direction_rank)
        and not c.stream
        and c.basis_dtype == torch.float32
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of it, by Student's t, within [0, 1]."""
    x = torch.tensor(values, dtype=torch.float64)
    mean, num = float(x.mean()), len(x)
    error = float(x.std()) / num**0.5 * _quantile(num - 1)
    return mean, max(0.0, mean - error), min(1.0, mean + error)


def _quantile(degrees: int) -> float:
    """97.5 % of Student's t; the expansion is exact to 1 % from three degrees on."""
    if degrees < len(FEW):
        return FEW[degrees]
    z, n = 1.959964, degrees
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / n + second / n**2


FEW = (math.inf, 12.7062, 4.3027, 3.1824)  # of 0 to 3 degrees of freedom
