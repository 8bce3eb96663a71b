"""The four questions a reader comes with, answered from the rows, or not at all.

Does filtering help here, what does it cost, how much is removed, how many directions
matter. Intervals are
95 % Student t intervals over seeds. "Clearly" means that the whole interval lies on one
side of zero; there is no correction for the number of comparisons.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dome_lab.paper.spectrum import spectra
from dome_lab.report.groups import (
    FEWEST_SEEDS,
    Group,
    is_spectrum,
    number,
    removed_share,
)
from dome_lab.report.pairs import VERDICTS, Pair, Timed, end, interval_of, signed
from dome_lab.report.sources import Trial

SHARE = 0.9  # of the variance, held by "the directions that matter"
FLAT = 0.8  # if so many of the directions are needed for it, the spectrum is flat
LONGEST = 60  # letters that a verdict has for where it was found
MANY = 3  # comparisons that are told one by one
UNTUNED = (
    "Neither arm was tuned: both have one learning rate, and part of the difference "
    "may be the learning rate's."
)
UNKNOWN = (
    "The rows do not tell whether either arm was tuned: part of the difference may be "
    "the learning rate's."
)
NO_SPECTRUM = "How many of them matter is in the eigenvalues, which were not recorded"
HELP = "Does filtering help here?"
COST = "What does it cost?"
AMOUNT = "How much is removed?"
DIRECTIONS = "How many directions matter?"


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its answer in a few words, and what that rests on.

    Attributes:
        question: As it is read.
        answer: In a few words.
        lines: What it rests on.
        is_known: Whether the rows tell.
        caveat: What stands right below the answer; may be empty.
    """

    question: str
    answer: str
    lines: list[str]
    is_known: bool = True
    caveat: str = ""


def answers_of(
    groups: Sequence[Group], pairs: Sequence[Pair], *, is_tuned: bool = False
) -> list[Answer]:
    """The four answers.

    Args:
        groups: The runs.
        pairs: The comparisons among them.
        is_tuned: Whether each arm has a learning rate that was chosen for it.
    """
    ours = all(trial.known for group in groups for trial in group.trials)
    untuned = "" if is_tuned else UNTUNED if ours else UNKNOWN
    return [
        _help(pairs, untuned),
        _cost(pairs),
        _amount(groups),
        _directions(groups),
    ]


def num_directions(trial: Trial) -> float:
    """How many eigenvalues make up 90 % of the sum of all that are noted; or NaN."""
    values = _last_spectrum(trial)
    if not values or not all(map(math.isfinite, values)) or sum(values) <= 0:
        return math.nan
    wanted, seen = SHARE * math.fsum(values), 0.0
    for count, value in enumerate(sorted(values, reverse=True), start=1):
        seen += value
        if seen >= wanted:
            return float(count)
    return float(len(values))


def _end_losses(pairs: Sequence[Pair]) -> list[str]:
    """Training losses at the end, where too few seeds decide nothing."""
    return [
        f"Training loss {pair.loss_before:.3g} → {pair.loss_after:.3g}"
        for pair in pairs
        if math.isfinite(pair.loss_before + pair.loss_after)
    ]


def _help(pairs: Sequence[Pair], untuned: str) -> Answer:
    if not pairs:
        why = "There are no runs with and without the filter of the same settings."
        return Answer(HELP, "Cannot be told", [why], is_known=False)
    told = [pair for pair in pairs if pair.accuracy is not None]
    if not told:
        why = "A verdict needs three seeds or more that ended with a number."
        known = any(math.isfinite(pair.before + pair.after) for pair in pairs)
        answer = "Not decided: too few seeds" if known else "Cannot be told yet"
        lines = [*map(_words, pairs[:MANY]), *_end_losses(pairs[:MANY]), why]
        return Answer(HELP, answer, lines, caveat=untuned if known else "")
    lines = [_words(pair) for pair in pairs]
    if len(pairs) > MANY:
        better, worse = (sum(p.verdict == sign for p in pairs) for sign in (1, -1))
        lines = [
            f"Accuracy is clearly better in {better} of {len(pairs)} comparisons, "
            f"clearly worse in {worse}. The ends:",
            *map(_words, _extremes(told)),
        ]
    caveat = " ".join(filter(None, (_in_seconds(told), untuned)))
    return Answer(HELP, _headline(told), [*lines, _losses(pairs)], caveat=caveat)


def _in_seconds(pairs: Sequence[Pair]) -> str:
    """What becomes of a lead in as many seconds; empty if there is none, or no time."""
    timed = [pair.timed for pair in pairs if pair.timed]
    if not timed or not any(pair.verdict > 0 for pair in pairs):
        return ""
    ahead = sum(one.is_ahead for one in timed)
    return f"In as many seconds it is clearly ahead in {ahead} of {len(timed)}."


def _headline(pairs: Sequence[Pair]) -> str:
    better, worse = ([p for p in pairs if p.verdict == sign] for sign in (1, -1))
    if better and worse:
        return "It depends"
    if better or worse:
        # A few seeds of one setting are no "yes": it says what was seen, and how often.
        some, word = (better, "Ahead") if better else (worse, "Behind")
        where = "" if len(some) == len(pairs) else f" {_where(some, pairs)}"
        return f"{word}{where}, in {_seeds(some)}"
    losses = {pair.loss_verdict for pair in pairs}
    if 1 in losses and -1 not in losses:
        return "Not clearly: lower loss, no clear gain in accuracy"
    if -1 in losses and 1 not in losses:
        return "Not clearly: higher loss, no clear change in accuracy"
    return "No clear difference"


def _seeds(pairs: Sequence[Pair]) -> str:
    fewest, most = (f(len(pair.seeds) for pair in pairs) for f in (min, max))
    return f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"


def _cost(pairs: Sequence[Pair]) -> Answer:
    ratios = sorted(pair.cost for pair in pairs if math.isfinite(pair.cost))
    if not ratios:
        why = (
            "The rows do not tell the seconds with the filter and without, "
            "or a tracker watches the runs without, which takes as long."
        )
        return Answer(COST, "Not measured", [why], is_known=False)
    first, last = f"{ratios[0]:.1f}", f"{ratios[-1]:.1f}"
    times = first if first == last else f"{first} to {last}"
    return Answer(
        COST,
        f"{times} times the time",
        ["of an epoch or step without the filter", *_equal_times(pairs)],
    )


def _equal_times(pairs: Sequence[Pair]) -> list[str]:
    """Both arms when the faster one had ended."""
    known = [(pair, pair.timed) for pair in pairs if pair.timed]
    if not known:
        return [
            "In that time one could train on without it, with which the gain is not "
            "compared here"
        ]
    lines = [_in_time(pair, timed) for pair, timed in known[:MANY]]
    rest = len(known) - len(lines)
    more = [f"and {rest} more comparisons, not listed"] if rest else []
    return ["In as many seconds, without the filter → with it:", *lines, *more]


def _in_time(pair: Pair, timed: Timed) -> str:
    is_share = timed.column == "test_accuracy"
    scale, digits, what = (100, 1, " % accuracy") if is_share else (1, 2, " loss")
    ends = " → ".join(f"{scale * v:.{digits}f}" for v in (timed.before, timed.after))
    told = no_interval(pair.seeds)
    if timed.change:
        told = signed(timed.change, scale, digits) + " points" * is_share
    return f"{_heading(pair)}{ends}{what}, {told}"


def _where(some: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    names = " and ".join(_at(pair.name) for pair in some)
    if all(pair.name for pair in some) and len(names) <= LONGEST:
        return names
    return f"in {len(some)} of {len(pairs)} comparisons"


def _at(name: str) -> str:
    bare = "no compression"
    if name.startswith(bare):
        return f"without compression{name.removeprefix(bare)}"
    return f"at {name}"


def _extremes(pairs: Sequence[Pair]) -> list[Pair]:
    ordered = sorted(pairs, key=lambda p: p.accuracy.mean if p.accuracy else math.nan)
    return [ordered[-1], ordered[0]]


def _words(pair: Pair) -> str:
    """A comparison in a line."""
    where = _heading(pair)
    if math.isnan(pair.before) or math.isnan(pair.after):
        return f"{where}no accuracy from every seed, with the filter and without"
    text = f"{where}{100 * pair.before:.1f} → {100 * pair.after:.1f} % accuracy"
    if pair.accuracy is None:
        return f"{text}; {no_interval(pair.seeds)}"
    return f"{text}, {signed(pair.accuracy, 100, 1)} points ({VERDICTS[pair.verdict]})"


def _heading(pair: Pair) -> str:
    return f"{pair.name[:1].upper()}{pair.name[1:]}: " if pair.name else ""


def _losses(pairs: Sequence[Pair]) -> str:
    lower, higher = (sum(p.loss_verdict == sign for p in pairs) for sign in (1, -1))
    if len(pairs) == 1:
        how = {1: "clearly lower", 0: "not clearly changed", -1: "clearly higher"}
        return f"Training loss at the end: {how[pairs[0].loss_verdict]}"
    more = f", clearly higher in {higher}" if higher else ""
    return f"Training loss at the end: clearly lower in {lower} of {len(pairs)}{more}"


def _amount(groups: Sequence[Group]) -> Answer:
    filtered = [group for group in groups if not group.is_plain]
    by_seed = _by_seed(filtered, removed_share)
    if not by_seed:
        why = "No run with a filter is among these."
        return Answer(AMOUNT, "Not measured", [why], is_known=False)
    lines = [f"of the batch gradient's norm, mean over all steps{_over(by_seed)}"]
    shares = [_by_seed([group], removed_share) for group in filtered]
    means = [100 * _mean(share) for share in shares if share]
    answer = f"{100 * _mean(by_seed):.0f} %{_bounds(by_seed, 100, 100)}"
    spread = f"{min(means):.0f} to {max(means):.0f} %"
    if len({group.arm for group in filtered}) > 1:
        # A mean over filters that differ would be nobody's.
        answer, lines = spread, ["of the batch gradient's norm, by the kind of filter"]
    elif max(means) - min(means) >= 1:
        lines.append(f"{spread} in different settings")
    held = _by_seed(filtered, lambda trial: end(trial, "fraction"))
    if held and answer != spread:
        lines.append(
            f"In the subspace lie {100 * _mean(held):.0f} %{_bounds(held, 100, 100)} "
            "of the norm of a single sample's gradient, at the end"
        )
    factors = _by_seed(filtered, lambda trial: end(trial, "bytes_factor"))
    if factors:
        lines.append(
            f"An unbiased compressor may compress {_mean(factors):.1f}"
            f"{_bounds(factors, 1, math.inf)} times harder behind the filter, at equal "
            "noise"
        )
    return Answer(AMOUNT, answer, lines)


def _directions(groups: Sequence[Group]) -> Answer:
    measured = [group for group in groups if group.spectra and _is_whole(group)]
    by_seed = _by_seed(measured, num_directions)
    if not by_seed:
        return _determined(groups)
    mean = _mean(by_seed)
    sizes = sorted({len(_last_spectrum(group.trials[0])) for group in measured})
    if len(sizes) > 1:
        return _directions_by_size(measured)
    of = f"{sizes[0]:,}"
    followed = not is_spectrum(measured[0].trials[0])
    what = f"{of} directions that are followed" if followed else "gradients"
    lines = [
        f"hold {100 * SHARE:.0f} % of the variance of the {what}, at the end"
        f"{_over(by_seed)}"
    ]
    if followed and mean > FLAT * sizes[0]:
        lines.append("The spectrum is flat: a larger rank would find more of them")
    return Answer(
        DIRECTIONS, f"{mean:.0f} of {of}{_bounds(by_seed, 1, sizes[0])}", lines
    )


def _determined(groups: Sequence[Group]) -> Answer:
    """Where no spectrum was noted: how many directions the samples have determined."""
    by_seed = _by_seed(
        [g for g in groups if not g.is_plain], lambda t: end(t, "effective_rank")
    )
    if not by_seed:
        why = "These rows have no spectrum of all the directions that are followed."
        return Answer(DIRECTIONS, "Not measured", [why], is_known=False)
    lines = ["directions had been determined by samples at the end"]
    return Answer(DIRECTIONS, f"{_mean(by_seed):.0f}", [*lines, NO_SPECTRUM])


def _directions_by_size(groups: Sequence[Group]) -> Answer:
    """The same where filters follow different numbers of directions."""
    lines = []
    for group in groups:
        by_seed = _by_seed([group], num_directions)
        if by_seed:
            size = len(_last_spectrum(group.trials[0]))
            found = f"{_mean(by_seed):.0f} of {size:,}{_bounds(by_seed, 1, size)}"
            lines.append(f"{group.arm}: {found}")
    answer = "It depends on how many are followed"
    why = f"Directions that hold {100 * SHARE:.0f} % of the variance followed:"
    return Answer(DIRECTIONS, answer, [why, *dict.fromkeys(lines)])


def _last_spectrum(trial: Trial) -> list[float]:
    if is_spectrum(trial):
        (values,) = spectra(trial.rows).values()
        return [float(value) for value in values]
    listed = trial.rows[-1].get("eigenvalues")
    return list(map(number, listed)) if isinstance(listed, list) else []


def _is_whole(group: Group) -> bool:
    """Whether there is an eigenvalue for every direction that is followed."""
    rank = group.settings.get("rank")
    found = len(_last_spectrum(group.trials[0]))
    layerwise = group.settings.get("layout") == "layerwise"
    cut = not isinstance(rank, int) or found >= rank
    return found > 0 and cut and not layerwise


def _by_seed(groups: Sequence[Group], read: Callable[[Trial], float]) -> list[float]:
    """One number a seed, mean over the groups; runs without one are left out."""
    found: dict[int, list[float]] = {}
    for trial in (trial for group in groups for trial in group.trials):
        value = read(trial)
        if math.isfinite(value):
            found.setdefault(trial.seed, []).append(value)
    return [_mean(values) for values in found.values()]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _over(by_seed: Sequence[float]) -> str:
    if interval_of(by_seed) is None:
        return f"; {no_interval(by_seed)}"
    return f"; {len(by_seed)} seeds, 95 % interval"


def no_interval(seeds: Sequence[object]) -> str:
    """Why there is no interval."""
    if len(seeds) == 1:
        return "one seed, no interval"
    how = "the same in " if len(seeds) >= FEWEST_SEEDS else ""
    return f"{how}{len(seeds)} seeds, no interval"


def _bounds(by_seed: Sequence[float], scale: float, most: float) -> str:
    """An interval, cut off at 0 and at the most that there can be."""
    found = interval_of(by_seed)
    if found is None:
        return ""
    low, high = max(0.0, scale * found.low), min(most, scale * found.high)
    digits = 1 if high - low < 2 else 0
    return f" [{low:,.{digits}f}, {high:,.{digits}f}]"
