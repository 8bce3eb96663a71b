import io

import pytest
from rich.console import Console

from dome.paper.comparison import compare
from dome.report.demo_text import sentence, table

RATES = (None, 1000.0, 10000.0)
GAINS = {"ahead": 0.1, "level": 0.0, "behind": -0.1}


def rows(*outcomes):
    return [
        {
            "seed": seed,
            "arm": arm,
            "rate": rate,
            "epoch": epoch,
            "train_loss": 1.0,
            # Seeds differ by more than the arms: only the paired difference tells.
            "test_accuracy": 0.5
            + 0.1 * seed
            + 0.01 * epoch
            + (arm == "filtered") * (GAINS[outcome] + 0.01 * (seed - 1)),
            "kept_norm": 0.75 if arm == "filtered" else 1.0,
        }
        for rate, outcome in zip(RATES, outcomes, strict=False)
        for arm in ("plain", "filtered")
        for seed in range(3)
        for epoch in (1, 2)
    ]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("ahead", "was ahead without compression (+10.0 ± 2.5 points)"),
        ("level", "made no clear difference without compression (+0.0 ± 2.5 points)"),
        ("behind", "was behind without compression (-10.0 ± 2.5 points)"),
    ],
)
def test_sentence_says_each_outcome(outcome, words):
    assert words in sentence(compare(rows(outcome)))


def test_sentence_names_each_rate_once_and_each_outcome_in_turn():
    said = sentence(compare(rows("level", "ahead", "behind")))
    assert "took 25 % of the gradient's norm away" in said
    order = [
        "no clear difference without",
        "ahead at rate 1,000",
        "behind at rate 10,000",
    ]
    assert [said.index(words) for words in order] == sorted(map(said.index, order))


def test_sentence_joins_rates_with_the_same_outcome():
    said = sentence(compare(rows("level", "ahead", "ahead")))
    assert said.count("ahead") == 1
    assert "at rate 1,000 (+10.0 ± 2.5 points) and at rate 10,000" in said


def test_table_has_a_line_for_each_rate_and_arm_in_eighty_columns():
    text = io.StringIO()
    Console(file=text, width=80).print(table(compare(rows("level", "ahead", "behind"))))
    lines = [line for line in text.getvalue().splitlines() if line.startswith("│")]
    assert len(lines) == 6
    assert "62.0 ± 24.8" in lines[0]
    assert "25 %" in lines[1]
    assert "…" not in text.getvalue()


def test_comparison_refuses_seeds_that_one_arm_lacks():
    lacking = [r for r in rows("level") if (r["arm"], r["seed"]) != ("plain", 2)]
    with pytest.raises(ValueError, match="finish the runs first"):
        compare(lacking)
