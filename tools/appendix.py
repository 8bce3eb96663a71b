"""docs/results/appendix.md: every verdict and every picture, made from the results.

python tools/appendix.py        # writes it in place
"""

from pathlib import Path

from dome_lab.paper.figures import caption, full_name, short_name
from dome_lab.report.claims_markdown import claims_markdown, read_claims

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
PAGE = RESULTS / "appendix.md"
OPENING = """# Appendix: verdicts and pictures

Made by `python tools/appendix.py` from the [claims](cpu/claims.json) at scale `cpu`.
[How a claim is judged](../reproduction.md#how-a-claim-is-judged) says what the words
mean. Ten more figures are [retired](retired/figures.md).

## Verdicts

"""


def page() -> str:
    """The table of verdicts, then each figure with its caption."""
    claims = read_claims(RESULTS / "cpu" / "claims.json")
    names = [full_name(short) for short in dict.fromkeys(c.figure for c in claims)]
    pictures = (
        f"## {short_name(name)}\n\n{caption(name)}\n\n![{name}](cpu/{name}.png)\n"
        for name in names
    )
    return OPENING + claims_markdown(claims) + "\n" + "\n".join(pictures)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
