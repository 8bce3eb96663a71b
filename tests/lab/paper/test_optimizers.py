from dataclasses import replace

import pytest
import torch

from dome_lab.paper.arms import AveragingMomentum, make_optimizer
from dome_lab.paper.run import Run

RUN = Run(task="digits", model="resnet8", seed=0, batch_size=8, epochs=1)


def literal_steps(start, grads, lr, beta):
    """Algorithm 1's lines for m and θ, one after the other."""
    weight, m = start.clone(), torch.zeros_like(start)
    for t, g in enumerate(grads, start=1):
        m = beta * m + (1 - beta) * g
        weight = weight - lr * m / (1 - beta**t)
    return weight


def stepped(optimizer, weight, grads):
    for g in grads:
        weight.grad = g.clone()
        optimizer.step()
    return weight.detach()


@pytest.fixture
def grads():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_averaging_momentum_is_the_papers(grads, beta):
    start = torch.ones(5, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    optimizer = AveragingMomentum([weight], lr=0.3, momentum=beta)
    expected = literal_steps(start, grads, 0.3, beta)
    torch.testing.assert_close(stepped(optimizer, weight, grads), expected)


def test_without_momentum_it_is_sgd(grads):
    ours, theirs = (
        torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2)
    )
    after = stepped(AveragingMomentum([ours], 0.1, 0.0), ours, grads)
    expected = stepped(torch.optim.SGD([theirs], 0.1), theirs, grads)
    torch.testing.assert_close(after, expected)


def test_steps_under_a_steady_gradient_are_a_tenth_of_torchs():
    lengths = []
    for make in (
        lambda p: AveragingMomentum(p, 0.1, 0.9),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    ):
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = make([weight])
        stepped(optimizer, weight, torch.ones(300, 1, dtype=torch.float64))
        before = weight.detach().clone()
        lengths.append(stepped(optimizer, weight, [torch.ones(1).double()]) - before)
    # After 300 steps 0.9^300 = 2e-14 is missing from torch's sum.
    torch.testing.assert_close(10 * lengths[0], lengths[1])


def test_a_parameter_without_gradient_stays_and_a_closure_is_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = AveragingMomentum([weight], 0.1, 0.9)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("ema", AveragingMomentum),
    ],
)
def test_a_run_has_the_optimizer_it_names(name, kind):
    momentum = 0.0 if name == "adam" else 0.9
    run = replace(RUN, optimizer=name, lr=0.2, momentum=momentum)
    optimizer = make_optimizer(torch.nn.Linear(2, 2), run)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 0.2
