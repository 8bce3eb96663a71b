"""The tables of docs/reference/models.md, from the rows that the zoo has written.

cd benchmarks && python -m model_zoo.table
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
ROWS, PAGE = DOCS / "results" / "model_zoo.jsonl", DOCS / "reference" / "models.md"
Row = dict[str, Any]

HEAD = (
    "| model | forward pass | samples | largest relative error | why |\n"
    "| --- | --- | --- | --- | --- |\n"
)


def read() -> list[Row]:
    """The rows of all tables."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def write(rows: Iterable[Row]) -> None:
    """Exchange the rows, and the tables made of them."""
    rows = list(rows)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(page(PAGE.read_text(), rows))


def page(text: str, rows: list[Row]) -> str:
    """A page with the table of each library between its marks exchanged."""
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        start, end = f"<!-- zoo: {library} -->\n", f"<!-- end: {library} -->"
        before, rest = text.split(start)
        text = before + start + table(own) + end + rest.split(end)[1]
    return text


def table(rows: list[Row]) -> str:
    """What was found of the models of one library, and what it was made with."""
    made_with = sorted({row["made_with"] for row in rows})
    exact = sum(row["result"] == "exact" for row in rows)
    count = f"{exact} of {len(rows)} exact; {'; '.join(made_with)}.\n\n"
    return count + HEAD + "".join(map(_line, rows))


def _line(row: Row) -> str:
    error = "" if row["error"] is None else f"{row['error']:.0e}"
    if row["dtype"] == "float32":
        error += " (float32)"
    cells = (row["name"], row["forward"], row["result"], error, _short(row["reason"]))
    return f"| {' | '.join(cells)} |\n"


def _short(reason: str) -> str:
    """The first sentence of a refusal: what happened, not what to do."""
    first = reason.split("\n")[0].split(". ")[0].split(": it")[0].replace("|", "/")
    return first.replace("<", "&lt;")


if __name__ == "__main__":
    write(read())
