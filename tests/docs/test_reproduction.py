"""The tuned accuracies of the summary are those of the judged rows."""

import json
import re

import pytest
from docs.pages import DOCS

PAGE = (DOCS / "results" / "reproduction.md").read_text()
CLAIMS = json.loads((DOCS / "results" / "cpu" / "claims.json").read_text())
TABLE = PAGE.partition("## What the filter is worth")[2].partition("\n## ")[0]
ROWS = [
    line.strip("| ").split(" | ")
    for line in TABLE.splitlines()
    if line.startswith("| ") and re.search(r"0\.\d", line)
]
NUMBER = r"−?\d+\.\d+"


def numbers(name, comparison):
    task = "CIFAR-10" if "CIFAR-10" in name else "MNIST"
    optimizer = "SGD" if name.startswith("SGD") else "Adam"
    rate = re.search(r"([\d,]+) times", name)
    sent = f"rate {rate[1]}" if rate else "uncompressed"
    starts, ends = f"{task}, {optimizer}", f"{sent}: ahead after as many {comparison}"
    figure = "ext18" if name.endswith(", every tenth step") else "ext04"
    found = [c for c in CLAIMS if c["figure"] == figure]
    (claim,) = (
        c for c in found if c["name"].startswith(starts) and c["name"].endswith(ends)
    )
    return [
        claim["numbers"][f"gain{end}"]
        for end in (", before", ", after", "", ", low", ", high")
    ]


def agree(text, values):
    shown = re.findall(NUMBER, text)
    rounded = [
        f"{value:.{len(number.partition('.')[2])}f}".replace("-", "−")
        for number, value in zip(shown, values, strict=True)
    ]
    assert shown == rounded


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_accuracies_and_gains_are_those_of_the_judged_rows(row):
    name, both, gain, long, gain_in_time = row
    before, after, *interval = numbers(name, "bytes")
    agree(f"{both} {gain}", [before, after, *interval])
    before, _, *interval = numbers(name, "seconds")
    agree(f"{long} {gain_in_time}", [before, *interval])


def test_all_problems_that_are_judged_are_shown():
    judged = [c for c in CLAIMS if c["name"].endswith("ahead after as many bytes")]
    assert len(ROWS) == len(judged) > 12


def test_counts_of_verdicts_are_those_of_the_claims():
    ours = [c for c in CLAIMS if c["figure"].startswith("fig")]
    counts = [
        sum(c["verdict"] == verdict for c in ours)
        for verdict in ("holds", "does not hold", "undecided")
    ]
    said = re.search(
        r"We check (\d+) claims of the paper: (\d+) hold, (\d+) do not, and (\d+) are",
        PAGE,
    )
    assert [int(n) for n in said.groups()] == [sum(counts), *counts]
