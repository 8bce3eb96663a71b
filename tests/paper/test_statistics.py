import math

import pytest
from scipy import stats

from dome.paper.statistics import Interval, student_interval


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
