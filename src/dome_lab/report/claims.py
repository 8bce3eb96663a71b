"""Figures and verdicts as tables: on screen, and in Markdown for pages and papers."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from dome_lab.paper.claims import FAILS, HOLDS, NOT_EVIDENCE, UNDECIDED, Claim, standing

COLOURS = {HOLDS: "green", FAILS: "red", UNDECIDED: "yellow", NOT_EVIDENCE: "dim"}
# What claims.py calls the ends of a number's interval, and what it is a change of.
LOW, HIGH, BEFORE, AFTER = ", low", ", high", ", before", ", after"
HOUR = 3600


def figure_table(
    captions: Mapping[str, str],
    scales: Sequence[str],
    numbers: Mapping[str, Sequence[str]],
) -> Table:
    """What figures there are, with the cells of each scale."""
    table = _table("figure", "what it shows")
    for scale in scales:
        table.add_column(scale, justify="right")
    for name, caption in captions.items():
        table.add_row(name, caption, *numbers[name], end_section=True)
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """Every claim with its verdict and the numbers behind it."""
    table = _table("figure", "claim", "verdict")
    table.add_column("measured: mean [95 % interval]", ratio=1)
    for claim in claims:
        table.add_row(
            claim.figure,
            claim.name,
            Text(claim.verdict, style=COLOURS[claim.verdict]),
            numbers(claim),
            end_section=True,
        )
    return table


def summary(claims: Sequence[Claim]) -> str:
    """How many claims got which verdict."""
    counted = Counter(claim.verdict for claim in claims)
    shown = [v for v in COLOURS if counted[v] or v != NOT_EVIDENCE]
    if counted[NOT_EVIDENCE] == len(claims):
        return f"{len(claims)} claims: not evidence, the runs are too small."
    counts = [f"{verdict} {counted[verdict]}" for verdict in shown]
    return f"{len(claims)} claims: {', '.join(counts)}."


def numbers(claim: Claim) -> str:
    """The numbers of a claim with their intervals; its reasons if it has none."""
    given = claim.numbers
    parts = []
    for name, value in given.items():
        if name.endswith((LOW, HIGH, BEFORE, AFTER)):
            continue
        text = f"{name} {value:.3g}"
        if {name + LOW, name + HIGH} <= given.keys():
            text += f" [{given[name + LOW]:.3g}, {given[name + HIGH]:.3g}]"
        if {name + BEFORE, name + AFTER} <= given.keys():
            text += f" ({given[name + BEFORE]:.3g} to {given[name + AFTER]:.3g})"
        parts.append(text)
    return "; ".join(parts) or claim.explanation


def _table(*headings: str, title: str | None = None) -> Table:
    return Table(
        *headings,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def claims_markdown(claims: Sequence[Claim]) -> str:
    """One line a claim: figure, claim, verdict, and what was measured.

    Beside each verdict: whether it stands when all claims are taken together
    (``claims.standing``), or is open again.
    """
    lines = [
        "| figure | claim, as checked | verdict | among all claims | measured: mean "
        "[95 % interval] |",
        "| --- | --- | --- | --- | --- |",
    ]
    for claim, stands in zip(claims, standing(claims), strict=True):
        left = "stands" if stands else "" if claim.verdict == UNDECIDED else "open"
        checked = f"{claim.name}. {claim.statement}"
        cells = (claim.figure, checked, claim.verdict, left, numbers(claim))
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def scales_markdown(cpu: Sequence[Claim], full: Sequence[Claim]) -> str:
    """The claims judged at scale full, each next to the same one at scale cpu."""
    lines = [
        "| figure | claim | scale `cpu` | scale `full` | measured at `cpu` | measured "
        "at `full` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    small = {(claim.figure, claim.name): claim for claim in cpu}
    for claim in full:
        before = small.get((claim.figure, claim.name))
        verdicts = ("-" if before is None else before.verdict, claim.verdict)
        measured = ("-" if before is None else numbers(before), numbers(claim))
        lines.append(_line((claim.figure, claim.name, *verdicts, *measured)))
    return "\n".join(lines) + "\n"


def read_claims(path: Path) -> list[Claim]:
    """The claims of a ``claims.json``."""
    return [Claim(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
