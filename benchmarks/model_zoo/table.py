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

OTHERS = "| model | samples | why |\n| --- | --- | --- |\n"


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
    """What was found of the models of one library.

    Names of those that are exact, with the largest error of any; a line for each other.
    """
    made_with = sorted({row["made_with"] for row in rows})
    exact = [row for row in rows if row["result"] == "exact"]
    others = [row for row in rows if row["result"] != "exact"]
    found = f"{len(exact)} of {len(rows)} exact; {'; '.join(made_with)}."
    errors = [
        f"{max(row['error'] for row in exact if row['dtype'] == dtype):.0e} in {dtype}"
        for dtype in sorted({row["dtype"] for row in exact}, reverse=True)
    ]
    text = f"{found} Largest relative error {', '.join(errors)}.\n\n"
    if others:
        text += OTHERS + "".join(map(_line, others)) + "\n"
    return f"{text}Exact: {' · '.join(map(_name, exact))}.\n"


def _name(row: Row) -> str:
    """A name; a dagger where torch or the model computes in float32."""
    return row["name"] + ("†" if row["dtype"] == "float32" else "")


def _line(row: Row) -> str:
    return f"| {row['name']} | {row['result']} | {_short(row['reason'])} |\n"


def _short(reason: str) -> str:
    """The first sentence of a refusal: what happened, not what to do."""
    first = reason.split("\n")[0].split(". ")[0].split(": it")[0].replace("|", "/")
    return first.replace("<", "&lt;")


if __name__ == "__main__":
    write(read())
