import io

from rich.console import Console

from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED, Claim
from dome_lab.report.claims import (
    claims_table,
    figure_table,
    numbers,
    summary,
)


def claim(verdict, given, explanation="Because."):
    return Claim("fig03", "far ahead", "A statement.", verdict, given, explanation)


def shown(table, width=80):
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    assert "…" not in text.getvalue()
    return text.getvalue()


def test_numbers_are_shown_with_their_interval_and_what_they_are_a_change_of():
    given = {"gain": 0.25, "gain, low": 0.2, "gain, high": 0.3}
    assert numbers(claim(HOLDS, given)) == "gain 0.25 [0.2, 0.3]"
    given |= {"gain, before": 0.5, "gain, after": 0.75, "seeds": 3.0}
    expected = "gain 0.25 [0.2, 0.3] (0.5 to 0.75); seeds 3"
    assert numbers(claim(HOLDS, given)) == expected


def test_a_claim_without_numbers_shows_its_reasons():
    assert numbers(claim(UNDECIDED, {})) == "Because."


def test_every_claim_has_a_line_with_its_verdict():
    given = {"gain": 0.25, "gain, low": 0.2, "gain, high": 0.3}
    text = shown(claims_table([claim(v, given) for v in (HOLDS, FAILS, UNDECIDED)]))
    for verdict in (HOLDS, FAILS, UNDECIDED):
        assert f" {verdict} " in text
    assert text.count("[0.2, 0.3]") == 3


def test_summary_counts_verdicts():
    claims = [claim(v, {}) for v in (HOLDS, HOLDS, UNDECIDED)]
    assert summary(claims) == "3 claims: holds 2, does not hold 0, undecided 1."


def test_figures_are_listed_with_their_runs():
    text = shown(figure_table({"fig03": "A caption."}, ["cpu"], {"fig03": ["24"]}))
    assert text.split()[-4:] == ["fig03", "A", "caption.", "24"]
