import json
from statistics import fmean

import pytest
from docs.pages import DOCS

PAGE = (DOCS / "how-to" / "choose.md").read_text()


def stored(*figures):
    paths = [DOCS / "results" / "cpu" / f"{figure}.jsonl" for figure in figures]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if row["epoch"] == row["of"]]


VARIANTS = stored("ext00_choices")
# What both figures need is computed for the first one.
RANKS = stored("fig03_mnist_compression", "fig04_rank_ablation")
PAPERS = {
    "rank": 100,
    "tracker": "power",
    "forget": None,
    "update_every": 1,
    "layout": "global",
    "oversample": 0,
    "removes": "span",
}


def accuracy(rate, rows=VARIANTS, num_seeds=3, **changed):
    """Test accuracy after the last epoch, mean over seeds, as the page writes it."""
    wanted = PAPERS | {"rate": rate} | changed
    last = {
        row["seed"]: row["test_accuracy"]
        for row in rows
        if row.get("compressor", "gaussian") in (None, "gaussian")
        and all(row[column] == value for column, value in wanted.items())
    }
    return f"{fmean(last[seed] for seed in range(num_seeds)):.3f}"


@pytest.mark.parametrize("rate", [100, 1000])
def test_accuracies_of_trackers_and_updates_are_those_of_the_rows(rate):
    power, svd = accuracy(rate), accuracy(rate, tracker="svd")
    begin = f"| test accuracy at rate {rate:,} |"
    assert f"{begin} {power} | {svd} |" in PAGE
    fifth, twentieth = (accuracy(rate, update_every=n) for n in (5, 20))
    assert f"{begin} {power} | {fifth} | - | {twentieth} |" in PAGE
    assert f"{accuracy(rate, forget=0.05)} at rate {rate:,}" in " ".join(PAGE.split())


def test_accuracies_by_rank_are_those_of_the_rows():
    ranks = (None, 1, 5, 10, 50, 100, 200, 500, 1000)
    found = (accuracy(1000, RANKS, num_seeds=8, rank=rank) for rank in ranks)
    row = " | ".join(found)
    assert f"| test accuracy | {row} |" in PAGE


def test_costs_are_those_of_the_performance_page():
    measured = (DOCS / "results" / "performance.md").read_text()
    for row in PAGE.splitlines():
        if row.startswith("| a step, B = "):
            numbers = [cell.strip() for cell in row.split("|")[2:-1]]
            for number in filter(lambda cell: cell != "-", numbers):
                assert f"| {number} (" in measured, row
