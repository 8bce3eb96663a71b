from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.parameters import Layout
from dome_lab.paper.arms import Arm
from dome_lab.paper.device import FIRST_BASIS, generator
from dome_lab.paper.run import Run

RUN = Run(task="", model="", seed=3, batch_size=8, epochs=1, optimizer="adam", rank=2)
PLAIN = replace(RUN, rank=None)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def batch(seed=5):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=rng, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=rng)


def samples_and_sent(model, run, optimizer=None):
    """The gradients of the samples, and what the optimizer is given of them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    arm, (x, y) = Arm(model, optimizer, run), batch()
    G = dome.per_sample_gradients(model, cross_entropy, x, y)
    cross_entropy(model(x), y).backward()
    kept, _ = arm.step()
    sent = Layout(model).gather()
    assert kept == pytest.approx(float(sent.norm() / G.mean(dim=0).norm()))
    return G, sent


def test_random_directions_are_taken_out_and_the_rest_is_left(model):
    G, sent = samples_and_sent(model, replace(RUN, removes="random"))
    g = G.mean(dim=0)
    noise = torch.randn(15, 2, generator=generator(RUN.seed, FIRST_BASIS))
    U = torch.linalg.qr(noise).Q.double()
    # The basis is drawn in single precision.
    torch.testing.assert_close(sent, g - U @ (U.T @ g), rtol=1e-5, atol=1e-7)


def test_normalised_samples_all_have_the_mean_norm(model):
    G, sent = samples_and_sent(model, replace(PLAIN, sample_norms="normalised"))
    norms = G.norm(dim=1, keepdim=True)
    torch.testing.assert_close(sent, (norms.mean() * G / norms).mean(dim=0))


def test_clipped_samples_are_no_larger_than_the_median(model):
    G, sent = samples_and_sent(model, replace(PLAIN, sample_norms="clipped"))
    clipped = [g * min(1.0, float(G.norm(dim=1).median() / g.norm())) for g in G]
    torch.testing.assert_close(sent, torch.stack(clipped).mean(dim=0))
    assert not torch.allclose(sent, G.mean(dim=0))


def test_directions_are_those_of_the_gradients_as_adam_scales_them(model):
    run = replace(RUN, removes="preconditioned")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    for p in model.parameters():  # a past in which some weights had large gradients
        p.grad = torch.linspace(0.1, 2.0, p.numel(), dtype=p.dtype).reshape(p.shape)
    optimizer.step()
    v = torch.cat(
        [optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()]
    )
    optimizer.zero_grad()
    G, sent = samples_and_sent(model, run, optimizer)
    g = G.mean(dim=0)
    S = ((0.999 * v + 0.001 * g.square()) / (1 - 0.999**2)).sqrt() + 1e-8
    tracker = dome.StreamingPower(
        15, 2, dtype=torch.float64, generator=generator(RUN.seed, FIRST_BASIS)
    )
    tracker.update(G / S)
    U = tracker.basis
    torch.testing.assert_close(sent, g - S * (U @ (U.T @ (g / S))))


def test_half_of_the_span_is_taken_out_at_half_strength(model):
    G, half = samples_and_sent(model, replace(RUN, strength=0.5))
    model.zero_grad()
    _, whole = samples_and_sent(model, RUN)
    torch.testing.assert_close(half, (G.mean(dim=0) + whole) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"removes": "random", "rank": None}, "needs a rank"),
        ({"removes": "preconditioned", "optimizer": "sgd"}, "is of adam's"),
        ({"sample_norms": "clipped"}, "needs no rank"),
        ({"strength": 1.5}, r"strength must lie in \[0, 1\]"),
    ],
)
def test_controls_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **changes)
