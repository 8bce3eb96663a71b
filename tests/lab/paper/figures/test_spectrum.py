import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from paper.figures.made import RUN
from torch import nn

from dome import per_sample_gradients
from dome.diagnostics import covariance_eigenpairs, covariance_eigenvalues
from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED, above
from dome_lab.paper.figures import load_figure
from dome_lab.paper.spectrum import (
    SEEN,
    cliff,
    flatness,
    kept_indices,
    knee,
    sharpness,
    slope,
    spectra,
)

C = 10
INDEX = np.arange(1.0, 2000.0)


def as_in_the_paper(num_large=C, num_outliers=C**2):
    values = 0.01 * INDEX**-0.1
    values[:num_outliers] *= (num_outliers / INDEX[:num_outliers]) ** 1.5
    values[:num_large] *= 10
    return values


def noisy(spectrum, rng, scatter=0.02):
    return np.sort(spectrum * np.exp(scatter * rng.normal(size=len(spectrum))))[::-1]


def eigenvalue_rows(spectrum, num_seeds=3, scatter=0.02):
    rng = np.random.default_rng(0)
    values = [noisy(spectrum, rng, scatter) for _ in range(num_seeds)]
    return [
        {**replace(RUN, seed=seed, rank=None).columns(), "epoch": RUN.epochs}
        | {"index": i, "eigenvalue": float(values[seed][i - 1])}
        for seed in range(num_seeds)
        for i in kept_indices(len(spectrum))
    ]


def verdicts(rows):
    return {c.name: c.verdict for c in load_figure("fig05").judge(rows)}


@pytest.mark.parametrize("num_samples", [12, 60])
def test_eigenvalues_are_those_of_the_full_covariance_of_a_small_model(
    rng, num_samples
):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(num_samples, 4, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (num_samples,), generator=rng)
    grads = per_sample_gradients(model, nn.functional.cross_entropy, x, y)
    expected = torch.linalg.eigvalsh(torch.cov(grads.T, correction=0)).flip(0)
    found = covariance_eigenvalues(grads)
    assert len(found) == min(num_samples - 1, grads.shape[1])
    torch.testing.assert_close(found, expected[: len(found)])


def test_eigenvalues_do_not_depend_on_the_blocks(rng, monkeypatch):
    grads = torch.randn(9, 100, generator=rng, dtype=torch.float64)
    whole = covariance_eigenvalues(grads)
    monkeypatch.setattr("dome.diagnostics.spectrum.COLUMNS", 7)
    torch.testing.assert_close(covariance_eigenvalues(grads), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_left_as_they_were(rng, dtype):
    grads = 3 + torch.randn(9, 100, generator=rng).to(dtype)
    before = grads.clone()
    covariance_eigenvalues(grads)
    covariance_eigenpairs(grads, 2)
    assert torch.equal(grads, before)


def test_gradients_that_are_not_finite_have_no_eigenvalues():
    grads = torch.ones(4, 6)
    grads[1, 2] = math.nan
    assert covariance_eigenvalues(grads).isnan().all()


def test_indices_that_are_kept_are_dense_at_first_and_end_at_the_last():
    assert kept_indices(5) == [1, 2, 3, 4, 5]
    kept = kept_indices(1999)
    assert kept[:300] == list(range(1, 301))
    assert kept[-1] == 1999
    assert len(kept) < 400
    assert sorted(set(kept)) == kept


def test_a_spectrum_is_rebuilt_from_the_indices_that_were_kept():
    spectrum = as_in_the_paper()
    rebuilt = spectra(eigenvalue_rows(spectrum, scatter=0.0))[1]
    # Linear interpolation between neighbours that are 3 % apart.
    np.testing.assert_allclose(rebuilt, spectrum, rtol=1e-3)


def test_a_power_law_has_one_slope_and_neither_cliff_nor_knee_nor_flat_bulk():
    law = INDEX**-1.2
    assert slope(law, 3, 700) == pytest.approx(1.2)
    assert cliff(law, C) == pytest.approx(0, abs=1e-12)
    assert knee(law, C**2) == pytest.approx(0, abs=1e-12)
    assert sharpness(law, C) == pytest.approx(0, abs=1e-12)
    assert flatness(law, C) == pytest.approx(1)


def test_a_cliff_is_seen_at_c_and_nowhere_else():
    assert cliff(as_in_the_paper(num_large=10), C) > 2
    assert cliff(as_in_the_paper(num_large=5), C) < 0
    assert cliff(as_in_the_paper(num_large=20), C) < 0


def test_a_knee_is_sharpest_where_the_outliers_end():
    assert knee(as_in_the_paper(), C**2) == pytest.approx(1.5)
    assert sharpness(as_in_the_paper(), C) > 0
    assert sharpness(as_in_the_paper(num_outliers=33), C) < 0
    assert sharpness(as_in_the_paper(num_outliers=300), C) < 0


def test_too_few_samples_tell_nothing():
    short = INDEX[:12] ** -1.0
    for criterion in (cliff, sharpness, flatness):
        assert math.isnan(criterion(short, C))
    assert set(verdicts(eigenvalue_rows(short)).values()) == {UNDECIDED}


def test_a_spectrum_as_in_the_paper_holds():
    assert set(verdicts(eigenvalue_rows(as_in_the_paper())).values()) == {HOLDS}


def test_a_spectrum_that_falls_ever_faster_does_not_hold():
    bent = np.exp(-0.02 * np.log(INDEX) ** 3)
    found = verdicts(eigenvalue_rows(bent, scatter=0.002))
    assert set(found.values()) == {FAILS}


@pytest.mark.parametrize("scatter", [0.02, 0.3])
@pytest.mark.parametrize("exponent", [0.5, 2.0])
def test_noisy_power_laws_pass_less_than_one_time_in_twenty(exponent, scatter):
    rng, num = np.random.default_rng(0), 200
    passed = {"cliff": 0, "outliers": 0}
    for _ in range(num):
        found = [noisy(INDEX**-exponent, rng, scatter) for _ in range(3)]
        passed["cliff"] += holds([cliff(v, C) for v in found], SEEN)
        passed["outliers"] += holds([knee(v, C**2) for v in found], SEEN) and holds(
            [sharpness(v, C) for v in found], 0
        )
    assert max(passed.values()) <= 0.05 * num


def holds(values, bound):
    return above("contrast", values, bound).verdict == HOLDS


def test_a_power_law_that_is_known_well_is_told_to_have_no_edge():
    rows = eigenvalue_rows(INDEX**-1.2, scatter=0.002)
    assert set(verdicts(rows).values()) == {FAILS}


def test_seeds_that_disagree_decide_nothing():
    rows = eigenvalue_rows(as_in_the_paper(), num_seeds=2) + [
        row | {"seed": 2} for row in eigenvalue_rows(INDEX**-1.0, num_seeds=1)
    ]
    assert set(verdicts(rows).values()) == {UNDECIDED}


@pytest.mark.paper
def test_a_run_that_diverged_is_drawn_and_decides_nothing():
    rows = eigenvalue_rows(as_in_the_paper(), num_seeds=2)
    lost = [r | {"eigenvalue": math.nan} if r["seed"] == 1 else r for r in rows]
    load_figure("fig05").draw(lost).draw_without_rendering()
    assert set(verdicts(lost).values()) == {UNDECIDED}
