from random import Random

import pytest
import torch

from dome.trackers import TRACKERS, StreamingPower
from dome.trackers.basis import FactoredBasis
from dome_lab.bench.questions import soak


def problems(num_updates, seed):
    config = soak.Config(num_updates=num_updates, seed=seed)
    rows = soak.compute(config, lambda *_: None)
    return rows, [problem for row in rows for problem in row["broken"]]


@pytest.mark.slow
def test_hostile_updates_break_nothing():
    rows, broken = problems(1_000, seed=1)
    assert not broken
    assert sum(row["num_updates"] for row in rows) >= 1_000
    # All kinds are among them, and not all that is hostile is left out.
    assert {row["tracker"] for row in rows} == set(TRACKERS)
    assert {row["layout"] for row in rows} == set(soak.LAYOUTS)
    assert {row["storage"] for row in rows} == {"float32", "float64", "bfloat16"}
    left_out = sum(row["num_left_out"] for row in rows)
    assert 0.02 < left_out / sum(row["num_updates"] for row in rows) < 0.4


def shared(self):
    """A state that is no copy."""
    none = self._S.new_empty(0, self.num_columns, dtype=torch.float64)
    shared = {"basis": self._S, "Q": none if self._Q is None else self._Q}
    return shared | self.small_state()


FAULTS = {
    "a state shares its basis": (
        "state that was taken before",
        FactoredBasis,
        "state_dict",
        shared,
    ),
    "eigenvalues of the wrong sign": (
        "an eigenvalue is",
        StreamingPower,
        "eigenvalues",
        property(lambda self: -self._eigenvalues - 1),
    ),
    "nothing is told as left out": ("was let in", StreamingPower, "num_skipped", 0),
    "half is removed": (
        "projecting twice",
        StreamingPower,
        "project_out",
        lambda self, g: g - 0.5 * self.basis.to(g) @ (self.basis.to(g).T @ g),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    words, owner, name, value = FAULTS[fault]
    monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(soak, "LAYOUTS", ("global",))
    monkeypatch.setattr(soak, "TRACKERS", {"power": StreamingPower})
    _, broken = problems(300, seed=2)
    assert broken
    assert any(words in problem for problem in broken)


@pytest.mark.parametrize("world", [1095, 1552, 3959])
def test_what_broke_once_holds(world):
    # A direction 10⁻¹¹ as long as the first, mixed with one that was not there; seven
    # columns of which each has enough of its own, and all together have little.
    rng, found = Random(f"0 {world}"), soak.Found()
    assert list(soak._live(soak.draw_setting(rng), rng, found)) == []
    assert found.num_updates >= soak.UPDATES_A_WORLD
