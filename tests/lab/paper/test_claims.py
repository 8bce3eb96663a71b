import json
import math

import pytest

from dome_lab.paper.claims import (
    FAILS,
    HOLDS,
    NOT_EVIDENCE,
    UNDECIDED,
    Claim,
    Finding,
    above,
    always,
    below,
    between,
    claim,
    combined,
    correlated,
    missing,
    not_evidence,
    paired,
    standing,
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
    after, before = {0: 0.49, 1: 0.91, 2: 0.7}, {2: 0.6, 1: 0.8, 0: 0.4, 3: 0.0}
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
    findings = [Finding(verdict, {}, "", p=0.001) for verdict in verdicts]
    assert combined(findings)[0] == expected


def test_a_claim_is_as_sure_as_its_least_sure_part():
    parts = [Finding(HOLDS, {}, "", p=p) for p in (0.01, 0.03)]
    assert combined(parts) == (HOLDS, 0.03)


def test_that_one_of_many_does_not_hold_is_less_sure_than_it_alone():
    parts = [Finding(FAILS, {}, "", p=0.01), Finding(HOLDS, {}, "", p=0.5)]
    assert combined(parts) == (FAILS, 0.02)
    assert combined([*parts, *parts[1:] * 5])[0] == UNDECIDED


def test_seeds_that_all_have_the_same_number_decide_nothing():
    finding = above("gain", [0.5, 0.5, 0.5], 0)
    assert finding.verdict == UNDECIDED
    assert finding.words == "gain 0.5 in all 3 seeds: no interval"


@pytest.mark.parametrize(
    ("rho", "verdict"),
    [((0.99, 0.98, 0.99), HOLDS), ((1.0,) * 3, HOLDS), ((-0.976,) * 3, FAILS)],
)
def test_correlations_are_judged_within_their_range_and_never_without_scatter(
    rho, verdict
):
    finding = correlated("rho", rho, num_points=30, bound=0.8)
    assert finding.verdict == verdict
    low, high = finding.numbers["rho, low"], finding.numbers["rho, high"]
    assert -1 < low < finding.numbers["rho"] < high < 1


def test_few_points_that_agree_in_all_seeds_decide_nothing():
    assert correlated("rho", (1.0, 0.9, 0.8), 5, bound=0.8).verdict == UNDECIDED


@pytest.mark.parametrize(("most", "verdict"), [(3.0, HOLDS), (2.5, FAILS)])
def test_what_is_computed_needs_no_interval(most, verdict):
    finding = always("spent", [2.0, 2.9, 2.9], most)
    assert finding.verdict == verdict
    assert finding.numbers == {"spent": 2.9}


def test_p_is_below_one_in_twenty_just_when_the_verdict_is_clear():
    for bound in (0.0, 0.07, 0.074, 0.076, 0.1, 0.124, 0.126, 0.2):
        finding = above("gain", NEAR_TENTH, bound)
        assert (finding.p < 0.05) == (finding.verdict != UNDECIDED)


def test_many_claims_stand_only_if_they_are_surer_than_one():
    def made(figure, p):
        return Claim(figure, "n", "s", HOLDS, {}, "e", p)

    alone = [made("fig03", 0.03)]
    assert standing(alone) == [True]
    many = [*alone, *(made("fig04", 1.0) for _ in range(9)), made("ext00", 0.03)]
    assert standing(many) == [*[False] * 10, True]
    assert standing([made("fig03", 0.001), *many])[0]


def test_a_claim_of_runs_that_are_too_small_is_no_evidence():
    small = not_evidence(Claim("fig03", "n", "s", HOLDS, {"x": 1.0}, "e", 0.01))
    assert small == Claim("fig03", "n", "s", NOT_EVIDENCE, {"x": 1.0}, "e", 1.0)


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
