import math
from dataclasses import replace

import numpy as np
import pytest
from paper.figures.made import RUN, training_rows

from dome_lab.paper.statistics import averages, curves, distinct, ends, number, select

ROWS = [
    *training_rows(replace(RUN, seed=1, epochs=2), 0.0, test_accuracy=[0.4, 0.8]),
    *training_rows(replace(RUN, seed=0, epochs=2), 0.0, test_accuracy=[0.2, 0.3]),
]


def test_curves_are_in_the_order_of_seeds_and_epochs():
    found = curves(ROWS[::-1], "test_accuracy")
    assert list(found) == [0, 1]
    assert np.array_equal(found[1], [0.4, 0.8])


def test_end_and_average_of_every_seed():
    assert ends(ROWS, "test_accuracy") == {0: 0.3, 1: 0.8}
    assert averages(ROWS, "test_accuracy") == pytest.approx({0: 0.25, 1: 0.6})


def test_what_a_row_has_no_number_for_is_nan():
    assert math.isnan(number({"fraction": None}, "fraction"))
    with pytest.raises(ValueError, match="expected a number in column task, got 'mn"):
        number({"task": "mnist"}, "task")


def test_rows_are_selected_by_all_columns():
    assert select(ROWS, seed=1, epoch=2) == ROWS[1:2]
    assert select(ROWS, seed=1, rate=10) == []
    assert distinct(ROWS, "seed") == [0, 1]
    assert distinct(ROWS, "rate") == []
