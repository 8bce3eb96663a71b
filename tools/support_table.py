"""The support tables of README.md and docs/support.md, made from docs/support.json.

python tools/support_table.py        # writes them in place
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "support.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "support.md")
BEGIN, END = "<!-- made by make matrix -->", "<!-- end of what make matrix made -->"
TRAINERS = ("lightning", "transformers", "accelerate", "opacus")


def table(results: dict) -> str:
    """One line an environment: versions, and what its tests said."""
    lines = [
        "| torch | Python | Lightning, Transformers, Accelerate, Opacus | core tests | "
        "trainers' tests |",
        "| --- | --- | --- | --- | --- |",
    ]
    for found in results["environments"].values():
        packages = found["packages"]
        others = ", ".join(packages.get(name, "-") for name in TRAINERS)
        suites = [told(found["suites"].get(s)) for s in ("quick", "integrations")]
        cells = [packages["torch"].partition("+")[0], found["python"], others, *suites]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def told(suite: dict | None) -> str:
    """What became of a suite, in words."""
    if suite is None:
        return "not run"
    if suite["failed"]:
        return f"**{suite['failed']:,} failed**, {suite['passed']:,} passed"
    return f"{suite['passed']:,} passed"


def filled(text: str, results: dict) -> str:
    """A page with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"


def main() -> None:
    """Write the table into every page that has it."""
    results = json.loads(RESULTS.read_text())
    for page in PAGES:
        page.write_text(filled(page.read_text(), results))


if __name__ == "__main__":
    main()
