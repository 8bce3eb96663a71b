import numpy as np
import pytest
from scipy import stats

from dome_lab.report import groups
from dome_lab.report.groups import line_of, spectra_of
from dome_lab.report.sources import Trial


def trials(*seeds, column="loss", time="epoch"):
    """One trial for each list of values, at times 1, 2, ..."""
    return [
        Trial({}, seed, [{time: t, column: v} for t, v in enumerate(values, 1)], True)
        for seed, values in enumerate(seeds)
    ]


def loss(row):
    return groups.number(row.get("loss"))


def test_means_and_intervals_are_scipys_at_every_place():
    values = np.array([[1.0, 2.0, 4.0], [3.0, 2.0, 1.0], [5.0, 2.5, 1.0]])
    line = line_of(trials(*values.tolist()), "epoch", loss)
    assert line.x == [1, 2, 3]
    assert line.mean == pytest.approx(values.mean(axis=0).tolist())
    error = stats.sem(values, axis=0)
    low, high = stats.t.interval(0.95, 2, loc=values.mean(axis=0), scale=error)
    assert line.low == pytest.approx(low.tolist())
    assert line.high == pytest.approx(high.tolist())


def test_one_seed_has_no_interval():
    line = line_of(trials([1.0, 2.0]), "epoch", loss)
    assert line.mean == [1.0, 2.0]
    assert line.low == line.high == [None, None]


@pytest.mark.parametrize("lost", [None, float("nan"), "text", True])
def test_no_mean_where_a_seed_has_no_number(lost):
    line = line_of(trials([1.0, 2.0], [1.0, lost]), "epoch", loss)
    assert line.mean == [1.0, None]
    shorter = line_of(trials([1.0, 2.0], [1.0]), "epoch", loss)
    assert shorter.mean == [1.0, None]


def test_long_lines_are_averaged_over_neighbours(monkeypatch):
    monkeypatch.setattr(groups, "MOST_POINTS", 3)
    line = line_of(trials([1.0, 3.0, None, 5.0, 9.0]), "epoch", loss)
    assert line.x == [1.5, 3.5, 5.0]
    assert line.mean == [2.0, 5.0, 9.0]


def test_spectra_are_geometric_means_at_shared_times():
    one = trials([[100.0, 1.0], [10.0, 0.0]], column="eigenvalues")
    two = trials([[1.0, 1.0], [10.0, 2.0], [5.0]], column="eigenvalues")
    first, second = spectra_of([*one, *two], "epoch")
    assert (first.time, second.time) == (1, 2)
    assert first.line.mean == pytest.approx([10.0, 1.0])
    assert first.line.high == [None, None]  # two seeds have no interval
    assert second.line.mean == [pytest.approx(10.0), None]


def test_a_row_an_eigenvalue_is_a_spectrum_too():
    rows = [{"epoch": 5, "index": i, "eigenvalue": 1.0 / i} for i in (1, 2, 4)]
    (spectrum,) = spectra_of([Trial({}, 0, rows, True)], "epoch")
    assert spectrum.time == 5
    assert spectrum.line.x == [1, 2, 4]
    assert spectrum.line.mean == pytest.approx([1.0, 0.5, 0.25])


def test_of_very_many_spectra_the_first_the_last_and_some_between(monkeypatch):
    monkeypatch.setattr(groups, "MOST_SPECTRA", 3)
    found = spectra_of(trials([[1.0]] * 11, column="eigenvalues"), "epoch")
    assert [spectrum.time for spectrum in found] == [1, 6, 11]
