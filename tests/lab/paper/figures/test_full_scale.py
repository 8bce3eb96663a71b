from dataclasses import replace

import pytest
from paper.figures.made import seeds

from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED
from dome_lab.paper.figures import load_figure
from dome_lab.paper.run import Run
from dome_lab.paper.tuning import judge_equal_time

RUN = Run(task="mnist", model="resnet8", seed=0, batch_size=128, epochs=10, rank=100)
RISING = [0.1 * epoch for epoch in range(1, 11)]
PLAIN = replace(RUN, rank=None)


def full(name):
    figure = load_figure(name)
    return figure, figure.SCALES["full"]


@pytest.mark.parametrize(("level", "verdict"), [(0.3, HOLDS), (0.5, FAILS)])
def test_equal_seconds_are_judged_at_the_epoch_that_fits(level, verdict):
    filtered = seeds(RUN, test_accuracy=RISING)
    plain = seeds(PLAIN, test_accuracy=level)
    # At the end the filtered arm is at 1.0, after as many seconds at 0.4.
    (claim,) = judge_equal_time("fig03", filtered + plain, 2.5, "test_accuracy")
    assert claim.verdict == verdict
    assert claim.numbers["gain"] == pytest.approx(0.4 - level, abs=0.001)
    assert claim.statement.startswith("After 4 filtered epochs")


def test_without_a_filtered_epoch_that_fits_nothing_is_judged():
    rows = seeds(RUN) + seeds(PLAIN)
    assert judge_equal_time("fig03", rows, 20.0, "test_accuracy") == []


def made(name):
    """Rows of all runs of a figure at full scale."""
    figure, config = full(name)
    runs = {replace(run, seed=0) for run in figure.runs(config)}
    rows = []
    for run in runs:
        wanted = {r.seed for r in figure.runs(config) if replace(r, seed=0) == run}
        ends = {"test_accuracy": 0.9 if run.arm == "filtered" else 0.6 + run.lr}
        if run.paced:
            ends |= {"processor_seconds": 2.0, "plain_seconds": 1.0}
        rows += [row for row in seeds(run, **ends) if row["seed"] in wanted]
    return figure, rows


def test_fig03_has_a_tuned_arm_and_one_seed_uncompressed():
    figure, rows = made("fig03")
    claims = {claim.name: claim for claim in figure.judge(rows)}
    tuned = claims["rate 100: ahead of a tuned unfiltered arm"]
    assert tuned.numbers["gain"] == pytest.approx(0.27, abs=0.01)
    assert tuned.verdict == HOLDS
    assert claims["ahead at rate 100"].numbers["gain at rate 100"] == pytest.approx(
        0.3, abs=0.01
    )
    assert claims["similar at low compression"].verdict == UNDECIDED
    for rate in ("rate 100", "rate 1,000"):
        assert claims[f"{rate}: ahead after as many seconds"].verdict == HOLDS
    drawn = figure.draw(rows)
    assert len(drawn.axes) == 3


@pytest.mark.parametrize("name", ["fig01", "fig06"])
def test_a_paced_run_tells_the_seconds_and_nothing_else(name):
    figure, rows = made(name)
    claims = {claim.name: claim for claim in figure.judge(rows)}
    assert "ahead after as many seconds" in claims
    without = [row for row in rows if not row["paced"]]
    others = {claim.name: claim for claim in figure.judge(without)}
    claims.pop("ahead after as many seconds")
    assert others == claims
    assert figure.draw(rows).axes


def test_full_scale_is_the_papers_run_but_for_the_data_that_is_there():
    for name, changed in (("fig01", {"num_train"}), ("fig06", {"num_train"})):
        figure, config = full(name)
        paper = figure.SCALES["paper"].run
        assert changed == {
            field
            for field in paper.columns()
            if paper.columns()[field] != config.run.columns()[field]
        }
    fig03, config = full("fig03")
    assert replace(config.run, num_train=None) == fig03.SCALES["paper"].run
