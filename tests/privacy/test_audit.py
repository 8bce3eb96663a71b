# A canary that is in the data or not, told from what training published: the parameters
# and the basis. Every bound is from Clopper-Pearson intervals that hold together with
# 95 %, over scores and thresholds fixed beforehand. The gradient of a sample is the
# sample itself (``setting.linear``): the canary is as strong as a sample can be.

import math

import pytest
import torch
from privacy.setting import linear, mean_output, train
from scipy.stats import beta
from torch.utils.data import TensorDataset

import dome
import dome.privacy

DIM, STEPS, RUNS = 12, 2, 150
DELTA = 1e-3
CONFIDENCE = 0.95
CLIP = 1.0
THRESHOLDS = {
    # How far training went along the canary, in units of the noise of all steps.
    "moved along it": [-0.5, 0.35, 1.2],
    # A direction along which training did not move at all, not even by noise.
    "did not move along it": [-1e-3],
    # How much of the canary's direction the basis holds.
    "is in the basis": [0.3, 0.9],
}


def world(with_canary):
    rng = torch.Generator().manual_seed(0)
    x = 0.3 * torch.randn(6, DIM, generator=rng, dtype=torch.float64)
    x[:, 0] = 0.0
    canary = torch.zeros(1, DIM, dtype=torch.float64)
    canary[0, 0] = 1e4
    return torch.cat([x, canary]) if with_canary else x


def published(basis, with_canary, seed, sigma, tamper):
    """Scores of what can be seen after training, and the epsilon that is claimed."""
    model = linear(DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {}
    if basis == "public":
        rng = torch.Generator().manual_seed(7)
        public = torch.randn(5, DIM, generator=rng, dtype=torch.float64)
        public[:, 0] = 0.0
        options = {"public": [(public, None)], "loss_fn": mean_output}
    private = dome.privacy.attach(
        model,
        optimizer,
        2,
        CLIP,
        sigma,
        sample_rate=1.0,
        basis=basis,
        expected_batch_size=1.0,
        window=2,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    tamper(private)
    x = world(with_canary)
    data = TensorDataset(x, torch.zeros(len(x)))
    train(model, optimizer, private, data, epochs=STEPS, loss_fn=mean_output)
    private.detach()
    along = -float(model.weight.detach()[0, 0]) / (sigma * CLIP * math.sqrt(STEPS))
    U = private._basis.directions()
    seen = {
        "moved along it": along,
        "did not move along it": -abs(along),
        "is in the basis": float(U[0].norm()),
    }
    return seen, private.epsilon(DELTA)


def lower_bound(inside, outside):
    """An epsilon that is exceeded with 95 % confidence, from scores in both worlds."""
    tests = [(name, t) for name, ts in THRESHOLDS.items() for t in ts]
    alpha = (1 - CONFIDENCE) / (4 * len(tests))  # four rates a test
    best = 0.0
    for name, threshold in tests:
        hits = sum(s[name] > threshold for s in inside)
        alarms = sum(s[name] > threshold for s in outside)
        for right, wrong in ((hits, alarms), (RUNS - alarms, RUNS - hits)):
            least = beta.ppf(alpha, right, RUNS - right + 1) if right else 0.0
            most = beta.ppf(1 - alpha, wrong + 1, RUNS - wrong) if wrong < RUNS else 1.0
            if least > DELTA:
                best = max(best, math.log((least - DELTA) / most))
    return best


def audit(basis, sigma, tamper=lambda private: None):
    """The bound that is found, and the epsilon that is claimed."""
    inside, outside = (
        [published(basis, present, first + i, sigma, tamper) for i in range(RUNS)]
        for present, first in ((True, 0), (False, RUNS))
    )
    found = lower_bound([seen for seen, _ in inside], [seen for seen, _ in outside])
    return found, inside[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["public", "released", "private"])
def test_a_canary_is_not_told_better_than_claimed(basis):
    found, claimed = audit(basis, sigma=1.0)
    assert 0 < found < claimed


def with_the_ordinary_tracker(private):
    """The guard bypassed: a basis that the private samples of the step turn."""
    tracker = dome.IncrementalSVD(DIM, 2, dtype=torch.float64)
    take = private._take

    def leak():
        rows = take()
        tracker.update(rows)
        return rows

    private._take = leak
    private._basis.directions = lambda: tracker.basis


def without_clipping(private):
    noised, norm = private._noised, private._max_norm
    private._max_norm = 1e9
    private._noised = lambda total, std: noised(total, std * norm / private._max_norm)


def with_less_noise(private):
    noised = private._noised
    private._noised = lambda total, std: noised(total, 0.1 * std)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tamper", [with_the_ordinary_tracker, without_clipping, with_less_noise]
)
def test_the_audit_catches_a_guard_that_was_bypassed(tamper):
    found, claimed = audit("public", 2.0, tamper)
    assert found > claimed


def test_the_bound_is_none_where_worlds_look_alike_and_grows_with_the_difference():
    def runs(values):
        still = {"did not move along it": -1.0, "is in the basis": 0.0}
        return [{"moved along it": value, **still} for value in values]

    alike = runs([i % 3 - 1.0 for i in range(RUNS)])
    assert lower_bound(alike, alike) == 0
    assert lower_bound(runs([9.0] * RUNS), runs([-9.0] * RUNS)) > 3
