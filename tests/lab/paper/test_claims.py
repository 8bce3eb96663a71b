import json
import math

import pytest

from dome_lab.paper.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Finding,
    above,
    below,
    between,
    claim,
    combined,
    missing,
    paired,
    write_claims,
)
from dome_lab.paper.statistics import student_interval

NEAR_TENTH = [0.09, 0.10, 0.11]  # 0.1 ± 0.025


@pytest.mark.parametrize(
    ("bound", "verdict"), [(0.05, HOLDS), (0.11, UNDECIDED), (0.2, FAILS)]
)
def test_above_asks_for_the_whole_interval(bound, verdict):
    assert above("gain", NEAR_TENTH, bound).verdict == verdict


@pytest.mark.parametrize(
    ("bound", "verdict"), [(0.2, HOLDS), (0.11, UNDECIDED), (0.05, FAILS)]
)
def test_below_asks_for_the_whole_interval(bound, verdict):
    assert below("loss", NEAR_TENTH, bound).verdict == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.0, 0.2, HOLDS), (0.1, 0.2, UNDECIDED), (0.2, 0.3, FAILS), (0.0, 0.05, FAILS)],
)
def test_between_asks_for_the_whole_interval(low, high, verdict):
    assert between("gain", NEAR_TENTH, low, high).verdict == verdict


def test_numbers_are_those_of_the_student_interval():
    expected = student_interval(NEAR_TENTH)
    assert above("gain", NEAR_TENTH, 0).numbers == {
        "gain": expected.mean,
        "gain, low": expected.low,
        "gain, high": expected.high,
    }


@pytest.mark.parametrize("values", [[], [0.1], [0.1, math.nan, 0.1]])
def test_what_has_no_interval_is_undecided(values):
    finding = above("gain", values, -1)
    assert finding.verdict == UNDECIDED
    assert finding.numbers == {}


def test_differences_are_paired_by_seed():
    after, before = {0: 0.5, 1: 0.9, 2: 0.7}, {2: 0.6, 1: 0.8, 0: 0.4, 3: 0.0}
    finding = paired("gain", after, before, low=0)
    assert finding.verdict == HOLDS
    assert finding.numbers["gain"] == pytest.approx(0.1)
    assert finding.numbers["gain, before"] == pytest.approx(0.6)
    assert finding.numbers["gain, after"] == pytest.approx(0.7)


def test_relative_differences_are_taken_of_the_value_before():
    finding = paired("change", {0: 1.1, 1: 2.2}, {0: 1.0, 1: 2.0}, relative=True)
    assert finding.numbers["change"] == pytest.approx(0.1)


def test_a_run_that_diverged_alone_is_on_the_wrong_side():
    finding = paired("change", {0: math.nan, 1: 1.0}, {0: 1.0, 1: 1.0}, high=9)
    assert finding.verdict == FAILS
    assert "1 of 2 seeds diverged" in finding.words


def test_runs_that_diverged_without_the_change_decide_nothing():
    nan = math.nan
    assert paired("change", {0: 1.0, 1: 1.0}, {0: nan, 1: 1.0}).verdict == UNDECIDED
    assert paired("change", {0: nan, 1: 1.0}, {0: nan, 1: 1.0}).verdict == UNDECIDED


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([UNDECIDED, FAILS, HOLDS], FAILS),
        ([], UNDECIDED),
    ],
)
def test_a_claim_holds_if_all_of_it_holds(verdicts, expected):
    assert combined([Finding(verdict, {}, "") for verdict in verdicts]) == expected


def test_claims_are_written_as_json_and_nothing_else_is_left(tmp_path):
    made = claim("fig01", "name", "statement", [above("gain", NEAR_TENTH, 0)], "Why.")
    lost = claim("fig02", "other", "statement", [missing("gain")])
    write_claims(tmp_path / "claims.json", [made, lost])
    first, second = json.loads((tmp_path / "claims.json").read_text())
    assert first["verdict"] == "holds"
    assert first["numbers"]["gain"] == pytest.approx(0.1)
    assert first["explanation"].endswith("(holds). Why.")
    assert second["verdict"] == "undecided"
    assert [path.name for path in tmp_path.iterdir()] == ["claims.json"]
