from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from paper.figures.made import RUN, SCATTER, seeds

from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED
from dome_lab.paper.drift import ANCHORS, LAGS
from dome_lab.paper.figures import load_figure
from dome_lab.paper.momentum import energy_share

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


def drifting(left, scatter=SCATTER):
    """Rows of ext02; ``left`` gives the overlap from the learning rate and lag."""
    run = cpu_run("ext02")
    return [
        {
            **replace(run, seed=seed, lr=lr).columns(),
            "epoch": 1,
            "step": anchor + lag,
            "anchor": anchor,
            "lag": lag,
            "subspace": basis,
            "num_samples": 300,
            "overlap": left(lr, lag) + shift + jitter(seed, lr),
        }
        for lr in (0.01, 0.3)
        for seed, shift in enumerate(scatter)
        for anchor in ANCHORS
        for lag in LAGS
        for basis in ("tracked", "covariance")
    ]


def test_a_subspace_that_moves_slowly_and_faster_at_larger_rates_holds():
    rows = drifting(lambda lr, lag: 0.99 - lr * lag / 100)
    assert set(verdicts("ext02", rows).values()) == {HOLDS}


def test_a_subspace_that_is_lost_at_once_does_not_hold():
    rows = drifting(lambda lr, lag: 0.2 + lr)
    assert set(verdicts("ext02", rows).values()) == {FAILS}


def test_lags_that_were_not_reached_decide_nothing():
    rows = [row for row in drifting(lambda *_: 0.95) if row["lag"] == 1]
    assert set(verdicts("ext02", rows).values()) == {UNDECIDED}


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
@pytest.mark.parametrize("name", ["ext01", "ext02", "ext03"])
def test_pictures_are_drawn_of_made_rows(name):
    rows = {
        "ext01": aligned(dict.fromkeys(KINDS, 0.9)),
        "ext02": drifting(lambda lr, lag: 0.99 - lr * lag / 100),
        "ext03": bulk((0.9,) * 4, (0.3,) * 4, (1, 3, 2, 30)),
    }[name]
    figure = load_figure(name).draw(rows)
    figure.draw_without_rendering()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) == len(set(legend)) == {"ext01": 4, "ext02": 2, "ext03": 4}[name]


def test_an_average_is_judged_against_the_one_that_averages_less():
    def shares(levels):
        run = replace(RUN, removes="nothing")
        return [
            row | {"beta": beta, "share": level + 0.01 * row["seed"] * (1 + beta)}
            for beta, level in zip((0.0, 0.9, 0.99), levels, strict=True)
            for row in seeds(run)
        ]

    assert set(verdicts("ext08", shares((0.9, 0.6, 0.3))).values()) == {HOLDS}
    found = verdicts("ext08", shares((0.5, 0.6, 0.3)))
    assert found["less in the subspace than gradient: β = 0.9"] == FAILS
    assert found["less in the subspace than β = 0.9: β = 0.99"] == HOLDS


def test_what_is_kept_is_judged_at_the_square_of_the_classes():
    def kept(few, many):
        run = replace(RUN, num_classes=20)
        return [
            row | {"kept_norm": level + rank * 1e-4 * row["seed"]}
            for rank, level in ((20, few), (400, many))
            for row in seeds(replace(run, rank=rank))
        ]

    name = "MNIST, 20 classes"
    more = f"{name}: more is removed with k = C²"
    most = f"{name}: most of the norm is removed with k = C²"
    assert verdicts("ext09", kept(0.8, 0.2)) == {more: HOLDS, most: HOLDS}
    assert verdicts("ext09", kept(0.9, 0.6)) == {more: HOLDS, most: FAILS}
    assert verdicts("ext09", kept(0.2, 0.8)) == {more: FAILS, most: FAILS}


def test_energy_in_a_subspace_is_that_of_the_coordinates():
    basis = torch.eye(3, dtype=torch.float64)[:, :2]
    vector = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)
    assert energy_share(basis, vector) == pytest.approx(0.8)
