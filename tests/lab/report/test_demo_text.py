import io

import pytest
from rich.console import Console

from dome_lab.paper.comparison import compare
from dome_lab.report.demo_text import sentence, table

RATES = (None, 1000.0, 10000.0)
GAINS = {"ahead": 0.1, "level": 0.0, "behind": -0.1}


def rows(*outcomes):
    return [
        row(rate, arm, seed, epoch, GAINS[outcome])
        for rate, outcome in zip(RATES, outcomes, strict=False)
        for arm in ("plain", "filtered")
        for seed in range(3)
        for epoch in (1, 2)
    ]


def row(rate, arm, seed, epoch, gain):
    filtered = arm == "filtered"
    # Seeds differ by more than the arms: only the paired difference tells.
    gained = filtered * (gain + 0.01 * (seed - 1))
    return {
        "seed": seed,
        "arm": arm,
        "rate": rate,
        "epoch": epoch,
        "train_loss": 2.0 - 0.5 * seed - 0.1 * epoch - gained,
        "test_accuracy": 0.5 + 0.1 * seed + 0.01 * epoch + gained,
        "kept_norm": 0.75 if filtered else 1.0,
        "lr": 0.01 if filtered else 0.003,
        "processor_seconds": 2.5 if filtered else 1.0 + 0.1 * epoch,
    }


@pytest.mark.parametrize(
    ("outcome", "accuracy", "loss"),
    [
        ("ahead", "+10.0 ± 2.5 points", "-0.10 ± 0.02"),
        ("level", "+0.0 ± 2.5 points", "+0.00 ± 0.02"),
        ("behind", "-10.0 ± 2.5 points", "+0.10 ± 0.02"),
    ],
)
def test_sentence_says_each_outcome(outcome, accuracy, loss):
    said = sentence(compare(rows(outcome))).replace("-0.00", "+0.00")
    words = {"ahead": "was ahead", "behind": "was behind"}
    verdict = words.get(outcome, "made no clear difference")
    assert f"in test accuracy it {verdict} without compression ({accuracy})" in said
    assert f"in training loss it {verdict} without compression ({loss})" in said
    assert "took 25 % of the gradient's norm away" in said
    # 2.5 against the median of 1.1 and 1.2: no filtered epoch fits into two others.
    assert said.endswith("takes 2.2 times as long with the filter.")
    assert "Each arm has, at each rate, the learning rate that is best for it" in said


def test_sentence_names_each_outcome_in_turn():
    said = sentence(compare(rows("level", "ahead", "behind")))
    order = ["difference without", "was ahead at rate 1,000", "behind at rate 10,000"]
    assert [said.index(w) for w in order] == sorted(said.index(w) for w in order)


def test_sentence_joins_rates_with_the_same_outcome():
    said = sentence(compare(rows("level", "ahead", "ahead")))
    assert said.count("was ahead") == 2
    assert "at rate 1,000 (+10.0 ± 2.5 points) and at rate 10,000" in said


def test_table_has_a_line_for_each_rate_and_arm_in_eighty_columns():
    text = io.StringIO()
    Console(file=text, width=80).print(table(compare(rows("level", "ahead", "behind"))))
    lines = [li for li in text.getvalue().splitlines() if {"yes", "no"} & {*li.split()}]
    first, second, *others = lines
    assert first.split() == ["none", "no", "0.003", "62.0"]
    assert second.split()[:3] == ["yes", "0.01", "62.0"]
    assert len(others) == 4
    assert "…" not in text.getvalue()


def test_arms_are_also_compared_after_as_many_seconds():
    quick = [
        r | {"processor_seconds": 1.7 if r["arm"] == "filtered" else 1.0}
        for r in rows("ahead")
    ]
    (compared,) = compare(quick)
    assert compared.timed.epochs == 1
    # One epoch less than without the filter, and ahead by a tenth.
    assert compared.timed.gain.mean == pytest.approx(0.1 - 0.01)
    said = sentence([compared])
    assert "in as many seconds it was ahead without compression (+9.0 ± 2.5" in said


def test_comparison_refuses_seeds_that_one_arm_lacks():
    lacking = [r for r in rows("level") if (r["arm"], r["seed"]) != ("plain", 2)]
    with pytest.raises(ValueError, match="finish the runs first"):
        compare(lacking)
