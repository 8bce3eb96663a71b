"""Verdicts as a Markdown table, for pages and papers."""

import json
from collections.abc import Sequence
from pathlib import Path

from dome_lab.paper.claims import UNDECIDED, Claim, standing
from dome_lab.report.claims_text import numbers


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
