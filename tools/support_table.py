"""The support tables of docs/reference/support.md, made from support.json next to it.

python tools/support_table.py        # writes them in place
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from features import ROWS, Row
from matrix import ENVIRONMENTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "reference" / "support.json"
PAGE = ROOT / "docs" / "reference" / "support.md"
BEGIN = "<!-- {} made by make matrix -->"
END = "<!-- end of {} -->"
TRAINERS = ("lightning", "transformers", "accelerate", "opacus")

Counts = dict[str, int]


def versions(results: dict) -> str:
    """One line an environment: versions, and what its tests said."""
    lines = [
        "| torch | Python | Lightning, Transformers, Accelerate, Opacus | core tests | "
        "trainers' tests |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, wanted in ENVIRONMENTS.items():
        found = results["environments"].get(name)
        if found is None:
            lines.append(
                f"| {wanted.torch} | {wanted.python} | - | not run | not run |"
            )
            continue
        packages = found["packages"]
        others = ", ".join(packages.get(name, "-") for name in TRAINERS)
        suites = [told(found["suites"].get(s)) for s in ("quick", "integrations")]
        cells = [packages["torch"].partition("+")[0], found["python"], others, *suites]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def told(suite: Counts | None) -> str:
    """What became of a suite, in words."""
    if suite is None:
        return "not run"
    if suite["failed"]:
        return f"**{suite['failed']:,} failed**, {suite['passed']:,} passed"
    return f"{suite['passed']:,} passed"


def features_and_tests(results: dict) -> str:
    """One line a feature: what its tests said where it is developed, and where."""
    lines = [f"| {' | '.join(cells)} |" for cells in states(results)]
    return "\n".join(["| | state (tests) | tests |", "| --- | --- | --- |", *lines])


def states(results: dict) -> Iterator[tuple[str, str, str]]:
    """Names of features, what became of their tests, and where these are."""
    environments = results["environments"]
    found = environments.get("development", {}).get("features", {})
    for row in ROWS:
        counts = found.get(row.name)
        state = "not run yet" if counts is None and row.paths else "never run"
        state = state if counts is None else state_of(**counts)
        yield row.name, state, where(row)
    for name in ("torch", "python", *TRAINERS):
        passed = {
            version_of(e, name) for e in environments.values() if succeeded(e, name)
        }
        ordered = sorted(passed - {None}, key=parts)
        yield (
            name.capitalize() if name != "torch" else name,
            listed(ordered),
            "make matrix",
        )


def where(row: Row) -> str:
    """Files and words by which the tests of a feature are found."""
    files = ", ".join(f"`{path}`" for path in row.paths) or "none"
    words = " or ".join(f"`{word}`" for word in row.words)
    return f"{files}: {words}" if words else files


def succeeded(environment: dict, name: str) -> bool:
    """Whether the tests of an environment that are about this name all passed."""
    suite = environment["suites"].get("integrations" if name in TRAINERS else "quick")
    return suite is not None and suite["passed"] > 0 and not suite["failed"]


def version_of(environment: dict, name: str) -> str | None:
    """Which version an environment has, without what a build adds to it."""
    found = environment["packages"].get(name, environment.get(name))
    return None if found is None else found.partition("+")[0]


def parts(version: str) -> list[int]:
    """A version to sort by."""
    return [int(n) for n in re.findall(r"\d+", version)]


def listed(versions: list[str]) -> str:
    """Versions whose tests passed."""
    return f"tested with {', '.join(versions)}" if versions else "not run yet"


def state_of(works: Counts, refused: Counts) -> str:
    """What the tests of a feature say of it."""
    failed = works["failed"] + refused["failed"]
    if failed:
        return f"**{failed:,} tests failed**"
    if works["passed"]:
        rest = f", refused by name elsewhere ({refused['passed']:,})"
        return f"tested ({works['passed']:,})" + (rest if refused["passed"] else "")
    if refused["passed"]:
        return f"refused by name ({refused['passed']:,})"
    there = f" (tests are there: {works['skipped']:,})" if works["skipped"] else ""
    return f"never run{there}"


TABLES = {
    "versions": versions,
    "features and tests": features_and_tests,
}


def filled(text: str, results: dict) -> str:
    """A page with the tables between their marks."""
    for name, table in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text:
            continue
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n{table(results)}\n\n{end}{after}"
    return text


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
