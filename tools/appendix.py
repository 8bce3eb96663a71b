"""docs/results/appendix.md: every verdict and every picture, made from the results.

python tools/appendix.py        # writes it in place
"""

from pathlib import Path

from dome_lab.paper.claims import Claim
from dome_lab.paper.figures import caption, full_name, short_name
from dome_lab.report.claims import (
    claims_markdown,
    read_claims,
    scales_markdown,
)

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
PAGE = RESULTS / "appendix.md"
OPENING = """# Appendix: verdicts and pictures

Made by `python tools/appendix.py` from the [claims](cpu/claims.json) at scale `cpu`.
[How a claim is judged](settings.md#how-a-claim-is-judged) says what the words
mean. Ten more figures are [retired](retired/figures.md).

## Verdicts

"""
FULL = """
## Scale full next to scale cpu

The paper's epochs, batch size, optimizer and learning rate, with all the data at hand,
from the [claims](full/claims.json) at scale `full`.

"""


def page(results: Path = RESULTS) -> str:
    """The tables of verdicts, then each figure with its caption."""
    cpu, full = (_claims(results / scale) for scale in ("cpu", "full"))
    text = OPENING + claims_markdown(cpu)
    if full:
        text += FULL + scales_markdown(cpu, full)
    shown = [*_pictures("cpu", cpu), *_pictures("full", full)]
    return text + "\n" + "\n".join(shown)


def _claims(folder: Path) -> list[Claim]:
    path = folder / "claims.json"
    return read_claims(path) if path.exists() else []


def _pictures(scale: str, claims: list[Claim]) -> list[str]:
    names = [full_name(short) for short in dict.fromkeys(c.figure for c in claims)]
    where = "" if scale == "cpu" else f", scale {scale}"
    return [
        f"## {short_name(name)}{where}\n\n{caption(name)}\n\n![{name}]"
        f"({scale}/{name}.png)\n"
        for name in names
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
