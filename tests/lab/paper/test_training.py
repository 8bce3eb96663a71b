from copy import deepcopy

import pytest
import torch

from dome_lab.paper.run import Run
from dome_lab.paper.train import Training, start

WAYS = {
    "averaging momentum": {"optimizer": "ema", "momentum": 0.9, "rank": 2},
    "preconditioned": {"optimizer": "adam", "rank": 2, "removes": "preconditioned"},
    "random directions": {"rank": 2, "removes": "random"},
    "normalised": {"sample_norms": "normalised", "rate": 10},
    "half strength": {"rank": 2, "strength": 0.5},
}


def under_way(changes):
    run = Run(
        task="digits",
        model="mlp",
        seed=1,
        batch_size=8,
        epochs=2,
        lr=0.01,
        num_train=24,
        num_test=10,
        **changes,
    )
    task, model = start(run)
    return model, Training(model, task, run)


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_a_run_goes_on_bit_for_bit_from_its_state(changes):
    whole, training = under_way(changes)
    steps = training.steps()
    for _ in range(training.num_steps):
        next(steps)
    state = deepcopy(training.state_dict())  # on disk it is a copy too
    second, going_on = under_way(changes)
    going_on.load_state_dict(state)
    losses = [step.loss for step in going_on.steps()]
    torch.testing.assert_close(losses, [s.loss for s in steps], rtol=0, atol=0)
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
