import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
CLAIMS = json.loads((ROOT / "docs" / "results" / "cpu" / "claims.json").read_text())
LINE = re.compile(r"^\| (MNIST|CIFAR-10), (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$")
ROWS = [found.groups() for line in PAGE.splitlines() if (found := LINE.match(line))]
RATES = {"uncompressed": "uncompressed"} | {
    f"{rate} times smaller": f"rate {rate}" for rate in ("10", "100", "1,000")
}


def numbers(case, comparison, figure="ext04"):
    name = f"{case}: ahead after {comparison}"
    (claim,) = (c for c in CLAIMS if (c["figure"], c["name"]) == (figure, name))
    return claim["numbers"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_accuracies_are_those_of_the_judged_rows(row):
    task, sent, by_bytes, by_seconds, filtered = row
    case = f"{task}, Adam, {RATES[sent]}"
    equal = numbers(case, "as many bytes")
    assert by_bytes == f"{equal['gain, before']:.3f}"
    assert by_seconds == f"{numbers(case, 'as many seconds')['gain, before']:.3f}"
    assert filtered == f"{equal['gain, after']:.3f}"


def test_what_every_tenth_step_gains_in_equal_seconds_is_as_judged():
    told = re.findall(r"from (0\.\d+) to (0\.\d+)", PAGE)
    cases = [
        "MNIST, Adam, rate 100",
        "MNIST, Adam, rate 1,000",
        "CIFAR-10, Adam, rate 100",
    ]
    judged = [numbers(case, "as many seconds", "ext18") for case in cases]
    keys = ("gain, before", "gain, after")
    assert told == [tuple(f"{found[key]:.2f}" for key in keys) for found in judged]


def test_every_rate_of_both_data_sets_is_shown():
    assert len(ROWS) == 2 * len(RATES)


COSTS = {
    "ResNet-8, k = 100, B = 16": "B = 16: ours",
    "ResNet-8, k = 100, B = 128": "B = 128: ours",
    "ResNet-8, k = 100, B = 16, `update_every=10`": "B = 16: ours, `update_every=10`",
    "ResNet-8, k = 100, B = 128, `update_every=10`": "B = 128: ours, `update_every=10`",
    "small GPT": "small GPT",
    "small MLP": "small MLP",
    "small Transformer with a large embedding, k = 70, B = 128": "Transformer of the "
    "paper's Figure 6, most of d an embedding",
    "BERT-base, `direction_rank=4`, k = 16": "BERT-base, Trainer, `direction_rank=4`, "
    "one thread",
}


def test_costs_are_those_of_the_performance_page():
    measured = (ROOT / "docs" / "results" / "performance.md").read_text()
    table = PAGE.partition("## What it costs")[2].partition("\n- ")[0]
    shown = dict(re.findall(r"^\| (.+) \| (\d[\d. to]*) \|$", table, re.MULTILINE))
    assert shown.keys() == COSTS.keys()
    for model, name in COSTS.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \|.*$", measured, re.MULTILINE)
        if " to " in shown[model]:
            assert f"| {shown[model]} |" in row
        else:
            ratios = re.findall(r"\| (\d+\.\d+)(?= \(| \|)", row)
            assert shown[model] in [f"{float(ratio):.1f}" for ratio in ratios], row


def test_it_can_be_read_in_four_minutes():
    words = [word for word in PAGE.split() if re.search(r"\w", word)]
    assert 600 <= len(words) <= 800
