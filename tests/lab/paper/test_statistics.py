import math

import numpy as np
import pytest
from scipy import stats

from dome_lab.paper.statistics import (
    Interval,
    bootstrap_band,
    rank_correlation,
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


def test_bootstrap_band_is_the_percentile_interval_of_scipy():
    values = np.random.default_rng(1).normal(size=(5, 3))
    band = bootstrap_band(values, 0.99)
    expected = stats.bootstrap(
        (values[:, 1],),
        np.mean,
        confidence_level=0.99,
        n_resamples=4000,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    assert band.mean[1] == pytest.approx(values[:, 1].mean())
    assert (band.low[1], band.high[1]) == pytest.approx((expected.low, expected.high))


def test_bootstrap_band_is_the_same_every_time():
    values = np.random.default_rng(1).normal(size=(3, 2))
    first, second = bootstrap_band(values, 0.95), bootstrap_band(values, 0.95)
    assert np.array_equal(first.low, second.low)
    assert np.array_equal(first.high, second.high)


def test_bootstrap_of_more_confidence_is_wider():
    values = np.random.default_rng(1).normal(size=(5, 1))
    assert bootstrap_band(values, 0.99).low < bootstrap_band(values, 0.8).low


@pytest.mark.parametrize("values", [np.ones((3, 2)), np.array([[1.0, 1.0]])])
def test_equal_seeds_and_a_single_one_have_a_band_of_no_width(values):
    band = bootstrap_band(values, 0.95)
    assert np.array_equal(band.low, np.ones(2))
    assert np.array_equal(band.high, np.ones(2))


def test_epochs_at_which_a_seed_diverged_have_no_band():
    values = np.array([[1.0, np.nan], [2.0, 1.0]])
    band = bootstrap_band(values, 0.95)
    assert np.isfinite([band.mean[0], band.low[0], band.high[0]]).all()
    assert np.isnan([band.mean[1], band.low[1], band.high[1]]).all()
    assert np.isnan(bootstrap_band(values[:, 1:], 0.95).mean).all()


def test_rank_correlation_sees_order_alone():
    x = np.array([5.0, 3.0, 2.0, 1.0])
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, np.array([4.0, 3.0, 1.0, 2.0])) == pytest.approx(0.8)


@pytest.mark.parametrize("lost", [[1.0, 1.0, 1.0], [1.0, np.nan, 2.0]])
def test_constant_or_lost_curves_have_no_rank_correlation(lost):
    assert math.isnan(rank_correlation(np.array([3.0, 2.0, 1.0]), np.array(lost)))
