"""Verdicts: what a figure claims, and what the rows say about it.

Every verdict comes from 95 % Student t intervals over seeds, of differences paired by
seed where two arms are compared. An interval wholly on the right side of its bound
holds, wholly on the wrong side does not hold, and across the bound is undecided. There
is no correction for the number of claims.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from dome_lab.paper.rows import write_text
from dome_lab.paper.statistics import Interval, interval_or_none, paired_changes

Verdict = Literal["holds", "does not hold", "undecided"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNDECIDED: Verdict = "undecided"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper, judged.

    Attributes:
        figure: Short name of the figure, such as "fig03".
        name: What the claim is about, in a few words.
        statement: The claim, sharp enough to be checked.
        verdict: "holds", "does not hold" or "undecided".
        numbers: What the verdict rests on.
        explanation: The verdict's reasons in plain words.
    """

    figure: str
    name: str
    statement: str
    verdict: Verdict
    numbers: dict[str, float]
    explanation: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured quantity against its bound; claims are made of these.

    Attributes:
        verdict: Of this quantity alone.
        numbers: Its interval, under names that begin with what it is.
        words: The same in words.
    """

    verdict: Verdict
    numbers: dict[str, float]
    words: str


def above(name: str, values: Sequence[float], bound: float) -> Finding:
    """Whether the mean of a quantity, one value a seed, is above a bound."""
    return between(name, values, bound, math.inf)


def below(name: str, values: Sequence[float], bound: float) -> Finding:
    """Whether the mean of a quantity, one value a seed, is below a bound."""
    return between(name, values, -math.inf, bound)


def between(name: str, values: Sequence[float], low: float, high: float) -> Finding:
    """Whether the mean of a quantity, one value a seed, lies between two bounds."""
    interval, verdict = interval_or_none(values), UNDECIDED
    if interval is None:
        return missing(name, values)
    if low < interval.low and interval.high < high:
        verdict = HOLDS
    elif interval.high < low or high < interval.low:
        verdict = FAILS
    return Finding(verdict, _numbers(name, interval), _words(name, interval))


def paired(
    name: str,
    after: Mapping[int, float],
    before: Mapping[int, float],
    low: float = -math.inf,
    high: float = math.inf,
    *,
    relative: bool = False,
) -> Finding:
    """Whether a difference, seed by seed, lies between two bounds.

    A run that diverged while its counterpart did not is on the wrong side of any bound.

    Args:
        name: What the difference is.
        after: The value with the change, by seed.
        before: The value without it, by seed. Seeds that have only one are left out.
        low: Lower bound.
        high: Upper bound.
        relative: Take after/before − 1 instead of after − before.
    """
    changes = paired_changes(after, before)
    seeds = list(changes)
    lost = [s for s in seeds if not math.isfinite(after[s])]
    lost = [s for s in lost if math.isfinite(before[s])]
    if lost:
        why = f"{len(lost)} of {len(seeds)} seeds diverged, their counterparts did not"
        return Finding(FAILS, {}, f"{name}: {why}")
    if relative:
        changes = {s: change / before[s] for s, change in changes.items()}
    finding = between(name, list(changes.values()), low, high)
    if not finding.numbers:
        return finding
    first, last = (sum(arm[s] for s in seeds) / len(seeds) for arm in (before, after))
    levels = {f"{name}, before": first, f"{name}, after": last}
    return replace(
        finding,
        numbers=finding.numbers | levels,
        words=f"{finding.words}, from {first:.3f} to {last:.3f}",
    )


def missing(name: str, values: Sequence[float] = ()) -> Finding:
    """A quantity that could not be measured: undecided."""
    lost = sum(not math.isfinite(v) for v in values)
    why = f"{lost} of {len(values)} seeds have no number" if lost else "too few seeds"
    return Finding(UNDECIDED, {}, f"{name}: {why if values else 'not measured'}")


def combined(findings: Sequence[Finding]) -> Verdict:
    """Holds if all hold; does not hold if one does not; else undecided."""
    verdicts = {finding.verdict for finding in findings}
    if FAILS in verdicts:
        return FAILS
    return HOLDS if verdicts == {HOLDS} else UNDECIDED


def claim(
    figure: str, name: str, statement: str, findings: Sequence[Finding], why: str = ""
) -> Claim:
    """A claim that holds if all its findings do; ``why`` is said after them."""
    numbers = {key: n for finding in findings for key, n in finding.numbers.items()}
    words = "; ".join(f"{f.words} ({f.verdict})" for f in findings) + "."
    return Claim(
        figure=figure,
        name=name,
        statement=statement,
        verdict=combined(findings),
        numbers=numbers,
        explanation=f"{words} {why}".strip(),
    )


def write_claims(path: Path, claims: Sequence[Claim]) -> None:
    """Write the claims as a JSON list, whole or not at all."""
    write_text(path, json.dumps([asdict(c) for c in claims], indent=2) + "\n")


def _numbers(name: str, interval: Interval) -> dict[str, float]:
    return {
        name: interval.mean,
        f"{name}, low": interval.low,
        f"{name}, high": interval.high,
    }


def _words(name: str, interval: Interval) -> str:
    return f"{name} {interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
