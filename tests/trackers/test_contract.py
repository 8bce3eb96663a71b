import pytest
import torch
from docs.examples import example
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.testing import TRACKER_CHECKS, check_tracker
from dome.trackers import TRACKERS

Mean = example("how-to/extend.md", "Mean")


class Registered(Mean):
    """In the table, where the filter gives options by name."""

    def __init__(self, dim, rank, **options):
        super().__init__(dim, rank)


KNOWN = TRACKERS | {
    "float64": lambda dim, rank: dome.StreamingPower(dim, rank, dtype=torch.float64),
    "bfloat16": lambda dim, rank: dome.StreamingPower(dim, rank, dtype=torch.bfloat16),
    "the one of the docs": Mean,
}


@pytest.mark.parametrize("check", TRACKER_CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_a_tracker_keeps_the_contract(make, check):
    check(make)


def broken(**members):
    return type("Broken", (Mean,), members)


class Kept(Mean):
    def state_dict(self):
        return {"basis": self.basis, "squares": self.eigenvalues}


class Writing(Mean):
    def update(self, grads, scale=1.0):
        super().update(grads.mul_(scale).add_(1e-3))


class Harmed(Mean):
    def update(self, grads, scale=1.0):
        mean = scale * grads.mean(dim=0)
        self.eigenvalues[0] = mean.norm() ** 2
        self.basis[:, 0] = mean / mean.norm()


BROKEN = {
    "lacks .*eigenvalues": type(
        "Short", (), {"__init__": lambda self, dim, rank: None, "update": print}
    ),
    "effective_rank is 1": broken(effective_rank=1.0),
    r"largest entry of .UᵀU": broken(
        update=lambda self, grads, scale=1.0: self.basis.fill_(1.0)
    ),
    "not so: eigenvalues are variances": broken(
        eigenvalues=property(lambda self: torch.tensor([-1.0]), lambda self, x: None),
        effective_rank=property(lambda self: float(self.basis.any())),
        update=lambda self, grads, scale=1.0: self.basis[0].fill_(1.0),
    ),
    "project out is the projection": broken(
        project_out=lambda self, g, strength=1.0: (
            g - self.basis.to(g) @ (self.basis.to(g).T @ g)
        )
    ),
    "update changes the samples": Writing,
    "scale multiplies the samples": broken(
        update=lambda self, grads, scale=1.0: Mean.update(self, grads)
    ),
    "bad batches do no harm": Harmed,
    "a later update changes the state": Kept,
    "loaded basis differs": broken(load_state_dict=lambda self, state: None),
}


@pytest.mark.parametrize(("words", "make"), BROKEN.items(), ids=BROKEN)
def test_a_broken_tracker_is_told_what_is_wrong(words, make):
    with pytest.raises(AssertionError, match=words):
        check_tracker(make)


def test_what_is_no_tracker_is_refused_at_attach():
    with pytest.raises(ValueError, match=r"made a Linear without last_update.*update"):
        dome.GradientFilter(small_classifier(), 3, tracker=torch.nn.Linear)


def test_a_tracker_may_be_given_a_name_in_the_table(rng, monkeypatch):
    monkeypatch.setitem(TRACKERS, "mean", Registered)
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=1, tracker="mean")
    for x, y in batches(rng, 3):
        step(model, optimizer, x, y)
    # The mean of the samples is the gradient; the basis is in float32.
    assert grad_filter.stats.kept_norm < 1e-6


def test_a_function_makes_trackers_for_every_layer_beside_ours(rng):
    made = []

    def make(dim, rank):
        made.append(Mean(dim, rank) if not made else dome.StreamingPower(dim, rank))
        return made[-1]

    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(
        model, optimizer, rank=1, tracker=make, layout="layerwise"
    )
    for x, y in batches(rng, 2):
        step(model, optimizer, x, y)
    assert list(grad_filter.trackers.values()) == made
    assert grad_filter.stats.effective_rank == 2


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
