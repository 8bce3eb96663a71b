from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from paper.figures.made import SCATTER, seeds

from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED
from dome_lab.paper.figures import load_figure

WIDE = (-0.4, 0.0, 0.4)


def cpu_run(name):
    return load_figure(name).SCALES["cpu"].run


def verdicts(name, rows):
    return {claim.name: claim.verdict for claim in load_figure(name).judge(rows)}


def jitter(*what):
    """A little that sets apart runs which are otherwise made alike."""
    return 1e-5 * np.random.default_rng(crc32(str(what).encode())).normal()


def aligned(tracked, covariance=0.8, scatter=SCATTER):
    """Rows of ext01; ``tracked`` is the overlap by matrix and number."""
    run = cpu_run("ext01")
    return [
        {
            **replace(run, seed=seed, removes=removes).columns(),
            "epoch": epoch,
            "step": 62 * epoch,
            "matrix": matrix,
            "num": num,
            "subspace": basis,
            "chance": 0.004,
            "num_samples": 500,
            "overlap": jitter(seed, matrix, num, removes, basis)
            + shift
            + (covariance if basis == "covariance" else overlap),
        }
        for (matrix, num), overlap in tracked.items()
        for removes in ("span", "nothing")
        for seed, shift in enumerate(scatter)
        for epoch in (1, 2)
        for basis in ("tracked", "covariance")
    ]


KINDS = [(m, n) for m in ("hessian", "gauss_newton") for n in (10, 100)]


def test_half_of_an_eigenspace_in_u_is_aligned():
    overlaps = dict(zip(KINDS, (0.9, 0.3, 0.9, 0.7), strict=True))
    found = verdicts("ext01", aligned(overlaps))
    assert found["U holds the C of the Hessian"] == HOLDS
    assert found["U holds the C² of the Hessian"] == FAILS
    assert found["U holds the C of the Gauss-Newton matrix"] == HOLDS
    assert found["U holds the C² of the Gauss-Newton matrix"] == HOLDS
    assert found["the tracker does not lag behind"] == HOLDS


def test_a_tracker_that_lags_behind_the_covariance_is_found_out():
    rows = aligned(dict.fromkeys(KINDS, 0.6), covariance=0.8)
    assert verdicts("ext01", rows)["the tracker does not lag behind"] == FAILS


def test_seeds_that_disagree_or_diverged_decide_nothing_about_alignment():
    rows = aligned(dict.fromkeys(KINDS, 0.5), scatter=WIDE)
    decided = verdicts("ext01", rows)
    decided.pop("the tracker does not lag behind")
    assert set(decided.values()) == {UNDECIDED}
    lost = [row | {"overlap": None} for row in aligned(dict.fromkeys(KINDS, 0.9))]
    assert set(verdicts("ext01", lost).values()) == {UNDECIDED}


def bulk(accuracy, loss, seconds, scatter=SCATTER):
    """Rows of ext03: SGD, DOME, narrow DOME, Hessian, in this order."""
    run = cpu_run("ext03")
    arms = [
        replace(run, rank=None),
        run,
        replace(run, rank=10),
        replace(run, rank=10, removes="hessian", update_every=10),
    ]
    rows = []
    for arm, top, low, s in zip(arms, accuracy, loss, seconds, strict=True):
        mine = [0.0] * 3 if arm.rank is None else scatter
        rows += seeds(arm, mine, test_accuracy=top, train_loss=low, processor_seconds=s)
    return rows


def test_arms_that_train_alike_hold():
    rows = bulk((0.9, 0.9, 0.9, 0.9), (0.3, 0.3, 0.3, 0.3), (1, 3, 2, 30))
    assert set(verdicts("ext03", rows).values()) == {HOLDS}


def test_arms_that_train_worse_or_cost_more_do_not_hold():
    rows = bulk((0.9, 0.8, 0.7, 0.8), (0.3, 0.5, 0.5, 0.5), (1, 30, 2, 30))
    assert set(verdicts("ext03", rows).values()) == {FAILS}


def test_arms_that_are_missing_decide_nothing():
    rows = bulk((0.9,) * 4, (0.3,) * 4, (1, 3, 2, 30))
    rows = [row for row in rows if row["rank"] is None]
    assert set(verdicts("ext03", rows).values()) == {UNDECIDED}


@pytest.mark.paper
@pytest.mark.parametrize("name", ["ext01", "ext03"])
def test_pictures_are_drawn_of_made_rows(name):
    rows = {
        "ext01": aligned(dict.fromkeys(KINDS, 0.9)),
        "ext03": bulk((0.9,) * 4, (0.3,) * 4, (1, 3, 2, 30)),
    }[name]
    figure = load_figure(name).draw(rows)
    figure.draw_without_rendering()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) == len(set(legend)) == {"ext01": 4, "ext03": 4}[name]
