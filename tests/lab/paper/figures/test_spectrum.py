import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from paper.figures.made import RUN
from torch import nn

from dome import per_sample_gradients
from dome.diagnostics import covariance_eigenvalues
from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED
from dome_lab.paper.figures import load_figure
from dome_lab.paper.spectrum import (
    flatness,
    kept_indices,
    leaders,
    outliers,
    spectra,
)

C = 10
INDEX = np.arange(1.0, 2000.0)


def as_in_the_paper(num_large=C, num_outliers=C**2):
    values = 0.01 * INDEX**-0.1
    values[:num_outliers] *= (num_outliers / INDEX[:num_outliers]) ** 1.5
    values[:num_large] *= 10
    return values


def eigenvalue_rows(spectrum, scatter=(0.9, 1.0, 1.1)):
    return [
        {**replace(RUN, seed=seed, rank=None).columns(), "epoch": RUN.epochs}
        | {"index": i, "eigenvalue": factor * float(spectrum[i - 1])}
        for seed, factor in enumerate(scatter)
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
    rebuilt = spectra(eigenvalue_rows(spectrum))[1]
    # Linear interpolation between neighbours that are 3 % apart.
    np.testing.assert_allclose(rebuilt, spectrum, rtol=1e-3)


def test_a_power_law_has_neither_outliers_nor_a_flat_bulk():
    law = INDEX**-1.2
    assert outliers(law, C) == 0
    assert flatness(law, C) == pytest.approx(1)


def test_a_spectrum_that_falls_ever_more_slowly_has_no_leaders():
    assert leaders(np.exp(1 / INDEX), C) == 2


@pytest.mark.parametrize("num", [5, 10, 20])
def test_leaders_end_where_the_spectrum_falls_fastest(num):
    spectrum = as_in_the_paper(num_large=num)
    # The fall is looked for over a doubling of the index, half of it on either side.
    assert num / 1.5 <= leaders(spectrum, C) <= num * 1.5


@pytest.mark.parametrize("num", [40, 100, 250])
def test_outliers_are_counted_up_to_the_bulk(num):
    count = outliers(as_in_the_paper(num_outliers=num), C)
    # The last ones are less than twice above the bulk's line.
    assert 0.5 * num <= count <= num


def test_too_few_samples_tell_nothing():
    short = INDEX[:30] ** -1.0
    assert math.isnan(leaders(short, C))
    assert math.isnan(outliers(short, C))
    assert math.isnan(flatness(short, C))
    assert set(verdicts(eigenvalue_rows(short)).values()) == {UNDECIDED}


def test_a_spectrum_as_in_the_paper_holds():
    assert set(verdicts(eigenvalue_rows(as_in_the_paper())).values()) == {HOLDS}


def test_a_power_law_does_not_hold():
    law = np.exp(1 / INDEX) * INDEX**-1.0
    assert set(verdicts(eigenvalue_rows(law)).values()) == {FAILS}


def test_seeds_that_disagree_decide_nothing():
    paper, law = as_in_the_paper(), np.exp(1 / INDEX) * INDEX**-1.0
    rows = eigenvalue_rows(paper, (1.0, 1.0)) + [
        row | {"seed": 2} for row in eigenvalue_rows(law, (1.0,))
    ]
    assert set(verdicts(rows).values()) == {UNDECIDED}


@pytest.mark.paper
def test_a_run_that_diverged_is_drawn_and_decides_nothing():
    rows = eigenvalue_rows(as_in_the_paper(), (1.0, math.nan))
    load_figure("fig05").draw(rows).draw_without_rendering()
    assert set(verdicts(rows).values()) == {UNDECIDED}
