"""Verdicts: what a figure claims, and what the rows say about it.

Every verdict comes from 95 % Student t intervals over seeds, of differences paired by
seed where two arms are compared. An interval wholly on the right side of its bound
holds, wholly on the wrong side does not hold, and across the bound is undecided. The
bound is the word's: "ahead" is above 0, "similar" has a margin that the claim states.
Of many claims some hold by chance: ``standing`` says which are left when all of them
are taken together.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from dome_lab.paper.rows import write_text
from dome_lab.paper.statistics import (
    LEVEL,
    Estimate,
    correlation_estimate,
    estimate,
    holm,
    paired_changes,
)

Verdict = Literal["holds", "does not hold", "undecided", "not evidence"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNDECIDED: Verdict = "undecided"
NOT_EVIDENCE: Verdict = "not evidence"  # too small to mean anything, as at scale smoke


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper, judged.

    Attributes:
        figure: Short name of the figure, such as "fig03".
        name: What the claim is about, in a few words.
        statement: The claim, sharp enough to be checked.
        verdict: "holds", "does not hold", "undecided" or "not evidence".
        numbers: What the verdict rests on.
        explanation: The verdict's reasons in plain words.
        p: How probable it is to see at least this if the verdict were wrong; 1 if
            undecided.
    """

    figure: str
    name: str
    statement: str
    verdict: Verdict
    numbers: dict[str, float]
    explanation: str
    p: float = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured quantity against its bound; claims are made of these.

    Attributes:
        verdict: Of this quantity alone.
        numbers: Its interval, under names that begin with what it is.
        words: The same in words.
        p: As of a claim.
    """

    verdict: Verdict
    numbers: dict[str, float]
    words: str
    p: float = 1.0


def above(name: str, values: Sequence[float], bound: float) -> Finding:
    """Whether the mean of a quantity, one value a seed, is above a bound."""
    return between(name, values, bound, math.inf)


def below(name: str, values: Sequence[float], bound: float) -> Finding:
    """Whether the mean of a quantity, one value a seed, is below a bound."""
    return between(name, values, -math.inf, bound)


def between(name: str, values: Sequence[float], low: float, high: float) -> Finding:
    """Whether the mean of a quantity, one value a seed, lies between two bounds.

    Undecided where all seeds have the same number, whose scatter is not known.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return missing(name, values)
    found = estimate(values)
    if found is None:
        words = f"{name} {values[0]:.3g} in all {len(values)} seeds: no interval"
        return Finding(UNDECIDED, {name: values[0]}, words)
    return _judged(name, found, low, high)


def correlated(
    name: str, correlations: Sequence[float], num_points: int, bound: float
) -> Finding:
    """Whether the mean of rank correlations, one a seed, is above a bound.

    Args:
        name: What is correlated.
        correlations: One a seed.
        num_points: Of how many points each is.
        bound: In (-1, 1).
    """
    if len(correlations) < 2 or not all(map(math.isfinite, correlations)):
        return missing(name, correlations)
    found = correlation_estimate(correlations, num_points)
    return _judged(name, found, bound, math.inf)


def always(name: str, values: Sequence[float], most: float) -> Finding:
    """Whether a quantity that is computed, not measured, is at most so in every run."""
    if not values:
        return missing(name)
    largest = max(values)
    verdict = HOLDS if largest <= most else FAILS
    return Finding(verdict, {name: largest}, f"{name} at most {largest:.3g}", p=0.0)


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
        return Finding(FAILS, {}, f"{name}: {why}", p=0.0)
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


def combined(findings: Sequence[Finding]) -> tuple[Verdict, float]:
    """Holds if all hold; does not hold if one does not; else undecided. And its p.

    That all hold is as sure as the least sure of them. That one of many does not is
    less sure than that one alone (Bonferroni), and undecided if it is not sure enough.
    """
    wrong = [finding.p for finding in findings if finding.verdict == FAILS]
    if wrong:
        p = min(1.0, len(findings) * min(wrong))
        return (FAILS, p) if p < LEVEL else (UNDECIDED, 1.0)
    if findings and all(finding.verdict == HOLDS for finding in findings):
        return HOLDS, max(finding.p for finding in findings)
    return UNDECIDED, 1.0


def claim(
    figure: str, name: str, statement: str, findings: Sequence[Finding], why: str = ""
) -> Claim:
    """A claim that holds if all its findings do; ``why`` is said after them."""
    numbers = {key: n for finding in findings for key, n in finding.numbers.items()}
    words = "; ".join(f"{f.words} ({f.verdict})" for f in findings) + "."
    verdict, p = combined(findings)
    return Claim(
        figure=figure,
        name=name,
        statement=statement,
        verdict=verdict,
        numbers=numbers,
        explanation=f"{words} {why}".strip(),
        p=p,
    )


def not_evidence(claim: Claim) -> Claim:
    """The claim without a verdict, for runs that are too small to give one."""
    return replace(claim, verdict=NOT_EVIDENCE, p=1.0)


def standing(claims: Sequence[Claim]) -> list[bool]:
    """Which verdicts stand when all claims of the paper are taken together.

    By Holm's correction, among the paper's claims and among ours beyond it (tables and
    extensions) each for themselves.
    """
    stands = [False] * len(claims)
    for papers in (True, False):
        family = [
            place
            for place, claim in enumerate(claims)
            if claim.figure.startswith("fig") == papers
        ]
        for place, left in zip(
            family, holm([claims[place].p for place in family]), strict=True
        ):
            stands[place] = left
    return stands


def write_claims(path: Path, claims: Sequence[Claim]) -> None:
    """Write the claims as a JSON list, whole or not at all."""
    write_text(path, json.dumps([asdict(c) for c in claims], indent=2) + "\n")


def _judged(name: str, found: Estimate, low: float, high: float) -> Finding:
    """An estimate against two bounds, of which one may be infinite."""
    left, right = found.ends
    inside = max(found.p_above(low), found.p_below(high))
    outside = min(found.p_below(low), found.p_above(high))
    verdict, p = UNDECIDED, 1.0
    if low < left and right < high:
        verdict, p = HOLDS, inside
    elif right < low or high < left:
        verdict, p = FAILS, outside
    numbers = {name: found.mean, f"{name}, low": left, f"{name}, high": right}
    words = f"{name} {found.mean:.3g} [{left:.3g}, {right:.3g}]"
    return Finding(verdict, numbers, words, p)
