import math

import pytest
import torch

import dome
from dome_lab.paper import train
from dome_lab.paper.train import SubspaceWatch

D, K, B = 30, 3, 12


class Filter:
    """What there is of a filter to look at."""

    def __init__(self, *trackers):
        self.trackers = dict(enumerate(trackers))


def updated(tracker, rng):
    tracker.update(torch.randn(B, tracker.basis.shape[0], generator=rng).double())
    return tracker.basis.clone()


@pytest.fixture
def tracker(rng):
    made = dome.IncrementalSVD(D, K, dtype=torch.float64)
    updated(made, rng)
    return made


def test_drift_is_the_largest_principal_angle_since_the_last_look(tracker, rng):
    watch, before = SubspaceWatch(), tracker.basis.clone()
    assert watch.look(Filter(tracker))["drift"] is None
    updated(tracker, rng)
    after = updated(tracker, rng)
    cosines = torch.linalg.svdvals(before.T @ after)
    expected = math.degrees(math.acos(float(cosines.min())))
    assert watch.look(Filter(tracker))["drift"] == pytest.approx(expected)
    # Between equal bases: arccos of 1 up to rounding.
    assert watch.look(Filter(tracker))["drift"] == pytest.approx(0.0, abs=1e-5)


def test_of_several_blocks_the_largest_drift_and_one_sorted_spectrum(tracker, rng):
    other = dome.IncrementalSVD(D, K, dtype=torch.float64)
    updated(other, rng)
    both, alone = SubspaceWatch(), SubspaceWatch()
    both.look(Filter(tracker, other))
    alone.look(Filter(other))
    updated(other, rng)
    looked = both.look(Filter(tracker, other))
    assert looked["drift"] == pytest.approx(alone.look(Filter(other))["drift"])
    values = [*tracker.eigenvalues.tolist(), *other.eigenvalues.tolist()]
    # Five digits are kept.
    expected = pytest.approx(sorted(values, reverse=True), rel=1e-4)
    assert looked["eigenvalues"] == expected


def test_without_a_filter_there_is_nothing_to_tell():
    assert SubspaceWatch().look(None) == {"eigenvalues": None, "drift": None}


def test_bases_too_large_to_copy_have_no_drift(tracker, monkeypatch):
    monkeypatch.setattr(train, "MOST_MEMORY", D * K * 8 - 1)
    watch = SubspaceWatch()
    watch.look(Filter(tracker))
    looked = watch.look(Filter(tracker))
    assert looked["drift"] is None
    assert len(looked["eigenvalues"]) == K
