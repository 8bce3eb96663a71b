import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
CLAIMS = json.loads((ROOT / "docs" / "results" / "cpu" / "claims.json").read_text())
LINE = re.compile(r"^\| (MNIST|CIFAR-10), (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$")
ROWS = [found.groups() for line in PAGE.splitlines() if (found := LINE.match(line))]
RATES = {"as they are": "uncompressed"} | {
    f"{rate} times smaller": f"rate {rate}" for rate in ("10", "100", "1,000")
}


def numbers(case, comparison):
    (claim,) = (c for c in CLAIMS if c["name"] == f"{case}: ahead after {comparison}")
    return claim["numbers"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_accuracies_are_those_of_the_judged_rows(row):
    task, sent, by_bytes, by_seconds, filtered = row
    case = f"{task}, Adam, {RATES[sent]}"
    equal = numbers(case, "as many bytes")
    assert by_bytes == f"{equal['gain, before']:.3f}"
    assert by_seconds == f"{numbers(case, 'as many seconds')['gain, before']:.3f}"
    assert filtered == f"{equal['gain, after']:.3f}"


def test_every_rate_of_both_data_sets_is_shown():
    assert len(ROWS) == 2 * len(RATES)


def test_it_can_be_read_in_four_minutes():
    assert 600 <= len(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).split()) <= 850
