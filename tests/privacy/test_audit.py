import math

import pytest
import torch
from privacy.auditing import (
    DIM,
    MU,
    RUNS,
    SHARE,
    SIGMA,
    THRESHOLDS,
    audit,
    bound,
    power,
)
from scipy.optimize import brentq
from scipy.stats import norm

import dome
from dome.privacy import filter as private_filter
from dome.privacy import releases
from dome.privacy.accounting import Budget
from dome.privacy.releases import Randomness

CASES = {
    "public": {"basis": "public"},
    "released": {"basis": "released"},
    "private": {"basis": "private"},
    "private, after learning": {"basis": "private", "learned": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_sample_more_is_told_as_well_as_claimed_and_no_better(case):
    found = audit(**case, whole=True)
    # Nearly as well: the sample is the worst there is, and little is given away.
    assert 0.7 * MU < found <= MU


def half_noise(monkeypatch):
    gaussian = Randomness.gaussian
    monkeypatch.setattr(
        Randomness, "gaussian", lambda self, shape, std: gaussian(self, shape, std / 2)
    )


def no_clipping(monkeypatch):
    monkeypatch.setattr(
        releases, "clipping_factors_", lambda G, _: torch.ones(len(G)).to(G)
    )


def no_root_2(monkeypatch):
    monkeypatch.setattr(private_filter, "MOMENT_SENSITIVITY", 1.0)


def no_share(monkeypatch):
    monkeypatch.setattr(private_filter, "divided", lambda sigma, _: (sigma, sigma))


def no_share_of_the_gradient(monkeypatch):
    def divided(sigma, share):
        return sigma, sigma / math.sqrt(share)

    monkeypatch.setattr(private_filter, "divided", divided)


FAULTS = {
    ("public", half_noise),
    ("released", half_noise),
    ("private", half_noise),
    ("public", no_clipping),
    ("released", no_clipping),
    ("private", no_clipping),
    ("private", no_root_2),
    ("private", no_share),
    ("private", no_share_of_the_gradient),
}


@pytest.mark.parametrize(
    ("basis", "fault"), sorted(FAULTS, key=str), ids=lambda x: getattr(x, "__name__", x)
)
def test_every_fault_is_found(monkeypatch, basis, fault):
    fault(monkeypatch)
    assert audit(basis) > MU


def test_a_basis_that_the_samples_of_the_step_turn_is_found():
    def with_the_ordinary_tracker(private):
        tracker = dome.IncrementalSVD(DIM, 2, dtype=torch.float64)
        tracker.update(private._samples.take())  # the same ones at every step
        private._basis.directions = lambda: tracker.basis

    assert audit("released", with_the_ordinary_tracker) > MU


def rates(mean, std, threshold):
    """Hits and false alarms of a score that is normal in both worlds."""
    return norm.cdf((mean - threshold) / std), norm.cdf(-threshold / std)


booked, free = list(THRESHOLDS.values())[:2]
joint = MU * math.sqrt(1 + SHARE)
# Of the score that shows it, with the canary: its mean and its standard deviation.
POWER = {
    "half the noise": rates(MU, 1 / 2, booked),
    "no clipping": rates(math.inf, 1.0, booked),
    "no √2": rates(MU, math.sqrt(1 - SHARE + SHARE / 2), booked),
    "no basis_share": rates(joint, math.sqrt((1 + SHARE**2) / (1 + SHARE)), free),
    "no basis_share of the gradient": rates(joint, 1.0, free),
}


@pytest.mark.parametrize("hits_and_alarms", POWER.values(), ids=POWER.keys())
def test_the_audit_would_find_each_fault_with_other_seeds_too(hits_and_alarms):
    assert power(*hits_and_alarms) > 0.999


def test_the_audit_does_not_cry_wolf():
    assert power(*rates(MU, 1.0, booked)) < 1e-4


def test_the_bound_is_none_where_worlds_look_alike_and_grows_with_the_difference():
    assert bound(RUNS // 2, RUNS // 2) < 0
    assert bound(RUNS, 0) > 1.5 * MU


@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_the_epsilon_that_is_claimed_is_no_less_than_that_of_the_audited_mu(delta):
    def excess(epsilon):
        tail = norm.cdf(-epsilon / MU - MU / 2)
        return norm.cdf(-epsilon / MU + MU / 2) - math.exp(epsilon) * tail - delta

    budget = Budget(SIGMA, 1.0)
    budget.spend()
    exact = brentq(excess, 0, 100)
    assert exact <= budget.epsilon(delta) < 1.5 * exact
