"""The report: one HTML page with everything in it.

Pictures are drawn by ``assets/page.js``, a few hundred lines of SVG, and not by Plotly:
its smallest bundle in the Python package is 4.8 MB, and a page with it starts slowly on
a phone. Ours has the size of its numbers. Nothing is loaded from anywhere, which the
page's own security policy enforces.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dome_lab.paper.claims import FAILS, HOLDS, NOT_EVIDENCE, UNDECIDED, Claim
from dome_lab.paper.rows import provenance, write_text
from dome_lab.paper.statistics import Interval
from dome_lab.report.answers import Answer, answers_of, no_interval
from dome_lab.report.claims import numbers
from dome_lab.report.groups import (
    FEWEST_SEEDS,
    MAIN,
    Group,
    Line,
    Metric,
    groups_of,
    metrics_of,
)
from dome_lab.report.labels import shown, varying
from dome_lab.report.pairs import VERDICTS, Pair, pairs_of, signed
from dome_lab.report.sources import Section

REPORT_FILE = "report.html"
NUM_DIGITS = 5
PLAIN_NUMBERS = Metric("eigenvalue", "", least=0.0)
MINUTE, HOUR = 60, 3600
MARKS = {HOLDS: "✓", FAILS: "✗", UNDECIDED: "?", NOT_EVIDENCE: "-"}
TONES = {
    HOLDS: "good",
    FAILS: "bad",
    UNDECIDED: "open",
    NOT_EVIDENCE: "open",
    1: "good",
    -1: "bad",
    0: "open",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A section with all that is computed from it."""

    section: Section
    groups: list[Group]
    metrics: list[Metric]
    pairs: list[Pair]
    answers: list[Answer]


def write_report(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page, whole or not at all; the same rows give the same bytes."""
    write_text(path, html(title, sections))


def html(title: str, sections: Sequence[Section]) -> str:
    """The page."""
    parts = [_part(section, alone=len(sections) == 1) for section in sections]
    claims = [claim for section in sections for claim in section.claims]
    environment = Environment(
        autoescape=True,  # names of runs are anybody's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(_asset("page.html")).render(
        title=title,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        data=Markup(_embedded([_data(part) for part in parts])),
        parts=[_shown(part) for part in parts],
        counts=_counts(claims),
        claims=[_claim(claim) for claim in claims],
        made_with=_made_with(sections),
        this=provenance()["dome"],
    )


def _part(section: Section, *, alone: bool) -> Part:
    """A section; one of many leaves out questions that it cannot answer."""
    groups = groups_of(section)
    pairs = pairs_of(groups)
    chosen = section.facts.get("chosen")
    found = answers_of(
        groups, pairs, is_tuned=isinstance(chosen, list) and "lr" in chosen
    )
    answers = [a for a in found if alone or a.is_known]
    return Part(section, groups, metrics_of(groups), pairs, answers)


def _asset(name: str) -> str:
    return (files("dome_lab.report") / "assets" / name).read_text(encoding="utf-8")


def _embedded(data: object) -> str:
    """JSON that cannot end the script element it stands in, whatever is in a name."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
    for character, escaped in escapes.items():
        text = text.replace(character, escaped)
    return text


def _data(part: Part) -> dict[str, object]:
    """What the pictures are drawn from."""
    groups = part.groups
    settings = list(dict.fromkeys(group.setting for group in groups))
    arms = list(dict.fromkeys(group.arm for group in groups))
    return {
        "settings": settings,
        "arms": arms,
        "time": groups[0].time_name,
        "known": all(group.trials[0].known for group in groups),
        "metrics": [
            {"column": m.key, "title": m.title, "unit": m.unit, "along": m.along}
            for m in part.metrics
        ],
        "groups": [
            {
                "setting": settings.index(group.setting),
                "arm": arms.index(group.arm),
                "name": _name(group),
                "seeds": len(group.trials),
                "lines": {
                    metric.key: _line(group.lines[metric.key], metric)
                    for metric in part.metrics
                    if metric.key in group.lines
                },
                "spectra": [
                    {"time": spectrum.time, **_line(spectrum.line, PLAIN_NUMBERS)}
                    for spectrum in group.spectra
                ],
            }
            for group in groups
        ],
    }


def _line(line: Line, metric: Metric) -> dict[str, object]:
    """A line as it is drawn; its interval ends where values do."""

    def shown(values: Sequence[float | None]) -> list[float | None]:
        return [_rounded(value, metric) for value in values]

    found: dict[str, object] = {"x": list(line.x), "mean": shown(line.mean)}
    if any(value is not None for value in line.low):
        found |= {"low": shown(line.low), "high": shown(line.high)}
    if line.seeds:
        found["seeds"] = [shown(seed) for seed in line.seeds]
    return found


def _rounded(value: float | None, metric: Metric) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    inside = min(max(value, metric.least), metric.most)
    return float(f"{metric.scale * inside:.{NUM_DIGITS}g}")


def _shown(part: Part) -> dict[str, object]:
    """What the page says of a section in words and tables."""
    section, groups = part.section, part.groups
    every = [group.settings for group in groups]
    different = varying(every)
    common = {k: shown(v) for k, v in every[0].items() if k not in different}
    return {
        "name": section.name,
        "caption": section.caption,
        "answers": part.answers,
        "pairs": [_pair(pair) for pair in part.pairs],
        "metrics": part.metrics,
        "num_main": sum(m in MAIN or bool(m.along) for m in part.metrics),
        "has_spectra": any(group.spectra for group in groups),
        "groups": [_group(group, groups, different) for group in groups],
        "different": [name.replace("_", " ") for name in different],
        "common": {name.replace("_", " "): value for name, value in common.items()},
        "files": section.files,
        "notes": section.notes,
        "known": all(group.trials[0].known for group in groups),
        "lines": _lines([len(group.trials) for group in groups]),
    }


def _lines(seeds: Sequence[int]) -> str:
    """What lines and bands are."""
    if max(seeds) == 1:
        return "Each line is one run."
    bands = "bands 95 % Student t intervals (of logarithms in the spectrum)"
    few = f"thin lines and points the seeds: an interval needs {FEWEST_SEEDS}"
    parts = [bands] * (max(seeds) >= FEWEST_SEEDS) + [few] * (2 in seeds)
    return f"Lines are means over {_range(seeds)} seeds, {', '.join(parts)}."


def _pair(pair: Pair) -> dict[str, object]:
    known = math.isfinite(pair.before + pair.after)
    levels = f"{100 * pair.before:.1f} → {100 * pair.after:.1f} %"
    losses = math.isfinite(pair.loss_before + pair.loss_after)
    return {
        "name": pair.name or "all runs",
        "seeds": len(pair.seeds),
        "accuracy": levels if known else "-",
        **_change("gain", pair.accuracy, 100, 1, pair.verdict, pair.seeds, known=known),
        **_change("loss", pair.loss, 1, 2, pair.loss_verdict, pair.seeds, known=losses),
    }


def _change(
    name: str,
    change: Interval | None,
    scale: float,
    digits: int,
    verdict: int,
    seeds: Sequence[int],
    *,
    known: bool,
) -> dict[str, str]:
    """A change with its verdict; or why there is none."""
    words = signed(change, scale, digits) if change else no_interval(seeds)
    return {
        name: words if known else "-",
        f"{name}_verdict": VERDICTS[verdict] if change else "",
        f"{name}_tone": TONES[verdict],
    }


def _group(
    group: Group, groups: Sequence[Group], different: Sequence[str]
) -> dict[str, object]:
    plain = [g for g in groups if g.is_plain and g.setting == group.setting]
    ratio = "-"
    if plain and plain[0].seconds > 0 and not group.is_plain:
        ratio = f"{group.seconds / plain[0].seconds:.1f}×"
    return {
        "name": _name(group),
        "seeds": len(group.trials),
        "values": [shown(group.settings.get(name)) for name in different],
        "seconds": _duration(group.seconds) if group.seconds else "-",
        "ratio": ratio,
    }


def _name(group: Group) -> str:
    return ", ".join(part for part in (group.setting, group.arm) if part)


def _claim(claim: Claim) -> dict[str, str]:
    return {
        "figure": claim.figure,
        "name": claim.name,
        "statement": claim.statement,
        "verdict": claim.verdict,
        "mark": MARKS[claim.verdict],
        "tone": TONES[claim.verdict],
        "numbers": numbers(claim),
        "explanation": claim.explanation,
    }


def _counts(claims: Sequence[Claim]) -> list[dict[str, object]]:
    counted = Counter(claim.verdict for claim in claims)
    return [
        {"verdict": v, "mark": MARKS[v], "tone": TONES[v], "number": counted[v]}
        for v in MARKS
        if v != NOT_EVIDENCE or counted[v]
    ]


def _made_with(sections: Sequence[Section]) -> list[dict[str, str]]:
    """The sessions that computed the rows, each once."""
    found: dict[str, dict[str, str]] = {}
    for section in sections:
        sessions = section.facts.get("made_with")
        for session in sessions if isinstance(sessions, list) else []:
            if isinstance(session, Mapping):
                named = {str(k): str(v) for k, v in session.items()}
                found.setdefault(repr(named), named)
    return list(found.values())


def _range(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _duration(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    if seconds < HOUR:
        return f"{seconds / MINUTE:.1f} min"
    return f"{seconds / HOUR:.1f} h"
