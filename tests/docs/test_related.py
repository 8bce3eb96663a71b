"""Accuracies on the page about other methods are those of the judged rows."""

import json

import pytest
from docs.pages import DOCS

PAGE = (DOCS / "explanation" / "related.md").read_text()
CLAIMS = json.loads((DOCS / "results" / "cpu" / "claims.json").read_text())
# Name of the row, the claim it is taken from, which of its numbers, decimals.
ROWS = [
    ("Bulk-SGD", "DOME does what removing the Hessian's", "change from", 3),
    ("no filter, rate 100", "DOME, k = 100: ahead of no filter", "gain", 2),
    ("`strength=0.5`", "DOME, strength 0.5, k = 100: as good as", "change", 2),
    ("100 random directions", "random directions, k = 100: as good as", "change", 2),
    ("top-k", "top-k, feedback: as good as DOME", "change", 2),
    ("Gaussian sketch", "DOME, k = 100, rate 28: ahead of no filter", "gain", 3),
]


def numbers(claim_starts, key):
    (found,) = (c for c in CLAIMS if c["name"].startswith(claim_starts))
    values = found["numbers"]
    (before,) = (v for k, v in values.items() if k.startswith(key) and "before" in k)
    (after,) = (v for k, v in values.items() if k.startswith(key) and "after" in k)
    return before, after


@pytest.mark.parametrize(("row", "claim", "key", "digits"), ROWS)
def test_accuracies_are_those_of_the_judged_rows(row, claim, key, digits):
    before, after = numbers(claim, key)
    # "As good as DOME" goes from DOME to the other method.
    other, dome = (after, before) if key == "change" else (before, after)
    (line,) = (part for part in PAGE.splitlines() if part.startswith(f"| {row}"))
    assert f"| {other:.{digits}f} | {dome:.{digits}f} |" in line


def test_powersgd_is_shown_with_and_without_the_filter():
    _, plain = numbers("PowerSGD, feedback, rate 28: ahead", "gain")
    _, filtered = numbers("PowerSGD, feedback, DOME, k = 100, rate 28: ahead", "gain")
    assert f"| {plain:.3f} | {filtered:.3f} |" in PAGE


def test_the_overlap_with_the_hessian_is_the_judged_one():
    (claim,) = (c for c in CLAIMS if c["name"] == "U holds the C of the Hessian")
    overlap = claim["numbers"]["DOME-filtered, on average"]
    assert f"holds {overlap:.2f} of\nthe Hessian's ten" in PAGE
