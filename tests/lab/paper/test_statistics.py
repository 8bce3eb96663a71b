import math

import numpy as np
import pytest
from scipy import stats

from dome_lab.paper.statistics import (
    Interval,
    correlation_estimate,
    estimate,
    holm,
    rank_correlation,
    student_band,
    student_interval,
)


def test_student_interval_agrees_with_scipy():
    values = [0.91, 0.87, 0.95, 0.90]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    interval = student_interval(values)
    assert interval.low == pytest.approx(expected.low)
    assert interval.high == pytest.approx(expected.high)


def test_equal_values_have_an_interval_of_no_width():
    assert student_interval([0.5, 0.5, 0.5]) == Interval(0.5, 0.0)


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="at least two values, got 1"):
        student_interval([0.5])


@pytest.mark.parametrize(
    ("mean", "sign"), [(0.3, 1), (0.1, 0), (0.0, 0), (-0.1, 0), (-0.3, -1)]
)
def test_sign_is_zero_unless_the_interval_leaves_zero_out(mean, sign):
    assert Interval(mean, 0.2).sign == sign
    assert math.copysign(1, Interval(mean, 0.2).low) <= math.copysign(1, mean)


def test_an_estimate_has_the_interval_and_the_p_of_scipy():
    values = [0.91, 0.87, 0.95, 0.90]
    found = estimate(values)
    expected = student_interval(values)
    assert found.ends == pytest.approx((expected.low, expected.high))
    for bound in (0.85, 0.90, 0.95):
        above = stats.ttest_1samp(values, bound, alternative="greater").pvalue
        below = stats.ttest_1samp(values, bound, alternative="less").pvalue
        assert found.p_above(bound) == pytest.approx(min(1.0, 2 * above))
        assert found.p_below(bound) == pytest.approx(min(1.0, 2 * below))


def test_values_that_are_the_same_have_no_estimate():
    assert estimate([0.1 + 0.2, 0.3, 0.3]) is None


def test_correlations_are_averaged_by_fishers_z():
    values = [0.5, 0.9, 0.7]
    found = correlation_estimate(values, num_points=1000)
    z = np.arctanh(values)
    expected = stats.ttest_1samp(z, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.tanh(z.mean()))
    assert found.ends == pytest.approx(np.tanh([expected.low, expected.high]))
    assert found.p_above(0.8) == 1.0
    assert found.p_below(1.0) == 0.0


def test_correlations_that_agree_still_have_the_scatter_of_one():
    found = correlation_estimate([0.8, 0.8, 0.8], num_points=10)
    assert found.error == pytest.approx(math.sqrt(1.06 / 7 / 3))
    wider = correlation_estimate([0.8, 0.8, 0.8], num_points=5)
    assert wider.ends[0] < found.ends[0] < found.ends[1] < wider.ends[1] < 1


def test_the_interval_of_a_correlation_covers_it_as_often_as_it_says():
    rng, covered, num = np.random.default_rng(0), 0, 400
    truth = 6 / math.pi * math.asin(0.8 / 2)  # Spearman's ρ of normals that have 0.8
    covariance = [[1, 0.8], [0.8, 1]]
    for _ in range(num):
        pairs = rng.multivariate_normal([0, 0], covariance, size=(3, 40))
        rho = [rank_correlation(x[:, 0], x[:, 1]) for x in pairs]
        low, high = correlation_estimate(rho, 40).ends
        covered += low < truth < high
    assert covered / num > 0.94


def test_a_correlation_of_three_points_is_refused():
    with pytest.raises(ValueError, match="at least 4 points, got 3"):
        correlation_estimate([0.5, 0.5], num_points=3)


def test_a_band_is_the_student_interval_of_every_column():
    values = np.random.default_rng(1).normal(size=(5, 3))
    band = student_band(values)
    for column in range(3):
        expected = student_interval(values[:, column].tolist())
        assert band.mean[column] == pytest.approx(expected.mean)
        assert band.low[column] == pytest.approx(expected.low)
        assert band.high[column] == pytest.approx(expected.high)
    assert (student_band(values, 0.99).low < band.low).all()


@pytest.mark.parametrize("values", [np.ones((3, 2)), np.array([[1.0, 1.0]])])
def test_equal_seeds_and_a_single_one_have_a_band_of_no_width(values):
    band = student_band(values)
    assert np.array_equal(band.low, np.ones(2))
    assert np.array_equal(band.high, np.ones(2))


def test_epochs_at_which_a_seed_diverged_have_no_band():
    values = np.array([[1.0, np.nan], [2.0, 1.0]])
    band = student_band(values)
    assert np.isfinite([band.mean[0], band.low[0], band.high[0]]).all()
    assert np.isnan([band.mean[1], band.low[1], band.high[1]]).all()
    assert np.isnan(student_band(values[:, 1:]).mean).all()


def test_holm_rejects_step_by_step():
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([0.04]) == [True]
    assert holm([]) == []


def test_rank_correlation_sees_order_alone():
    x = np.array([5.0, 3.0, 2.0, 1.0])
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, np.array([4.0, 3.0, 1.0, 2.0])) == pytest.approx(0.8)


@pytest.mark.parametrize("lost", [[1.0, 1.0, 1.0], [1.0, np.nan, 2.0]])
def test_constant_or_lost_curves_have_no_rank_correlation(lost):
    assert math.isnan(rank_correlation(np.array([3.0, 2.0, 1.0]), np.array(lost)))
