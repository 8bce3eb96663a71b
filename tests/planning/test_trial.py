import time
from itertools import count

import pytest
import torch
from models import small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.planning import training as planning
from dome.planning import trial
from dome.planning.trial import UpdateTimes, time_updates


@pytest.fixture
def quick(monkeypatch):
    """Bases take no time: what is left is what samples take."""
    monkeypatch.setattr(planning, "time_updates", lambda *_: UpdateTimes(0.0, 0.0))


class Language(nn.Module):
    """As nanoGPT: logits, and the loss if there are targets."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids, targets=None):
        self.calls += 1
        logits = self.head(self.words(ids))
        if targets is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


IDS = torch.arange(28).view(4, 7) % 10
GIVEN = {
    "by place": ((None, IDS, IDS), {}),
    "a tuple": ((None, (IDS, IDS)), {}),
    "a dictionary": ((None, {"ids": IDS, "targets": IDS}), {}),
    "by name": ((None,), {"ids": IDS, "targets": IDS}),
    "a loss of results": ((lambda out: out[0].square().mean(), IDS), {}),
}


@pytest.mark.parametrize(("args", "kwargs"), GIVEN.values(), ids=GIVEN)
def test_a_batch_is_taken_as_everywhere(quick, args, kwargs):
    plan = dome.plan(Language(), 2, None, *args, **kwargs)
    assert plan.batch_size == 4
    assert plan.plain > 0
    assert all(choice.seconds >= choice.projection >= 0 for choice in plan.choices)


def test_the_model_is_left_as_it_is(quick):
    model = Language()
    model.head.weight.grad = torch.ones(10, 8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    dome.plan(model, 2, None, None, IDS, IDS)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones(10, 8))
    assert model.words.weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model._forward_hooks


def test_a_filter_that_is_attached_does_not_see_the_trial(quick):
    model, x, y = small_classifier(), *data()
    grad_filter = dome.GradientFilter(model, 3)
    dome.plan(model, 2, None, cross_entropy, x, y)
    cross_entropy(model(x), y).backward()
    grad_filter.step()
    assert grad_filter.stats.step == 1


def data():
    return torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 3


def test_what_samples_take_is_in_the_times_with_a_batch(quick, monkeypatch):
    ticks = count()
    # Plain steps take 1, steps with samples 5, the others 2.
    seconds = iter([1.0, 5.0, 2.0, 7.0])  # the last with directions of low rank
    monkeypatch.setattr(trial, "_least", lambda step, clock: next(seconds))
    plan = dome.plan(small_classifier(), 2, None, cross_entropy, *data(), clock=ticks)
    assert plan.plain == 1
    for choice in plan.choices[:-1]:
        assert (choice.seconds, choice.projection) == (4, 1)
    assert plan.choices[-1].seconds == 6
    assert "forward and backward, which take 1000.0 ms" in str(plan)
    without = dome.plan(small_classifier(), 2, 6)
    assert without.plain is None
    assert "give a batch" in str(without)


def test_seconds_are_those_of_the_clock_that_is_given():
    ticks = count(step=1)
    plan = dome.plan(
        small_classifier(), 2, None, cross_entropy, *data(), clock=lambda: next(ticks)
    )
    # Every trial is one tick long: samples add nothing, update and projection one each.
    assert plan.plain == 1
    assert plan.choices[0].seconds == 2


def test_a_part_of_large_blocks_is_timed_and_scaled(monkeypatch):
    sizes = []

    class Counted(dome.StreamingPower):
        def __init__(self, dim, rank, **options):
            sizes.append(dim)
            super().__init__(dim, rank, **options)

    monkeypatch.setattr(trial, "StreamingPower", Counted)
    monkeypatch.setattr(trial, "NUMBERS", 7_000)
    ticks = count()
    cpu = torch.device("cpu")
    found = time_updates([600, 400], 4, 3, cpu, lambda: next(ticks))
    assert sizes == [600, 400]  # 1,000 numbers of 4 + 3 each
    assert found.projection == 1
    sizes.clear()
    found = time_updates([6000, 4000], 4, 3, cpu, lambda: next(ticks))
    assert sizes == [600, 400]
    assert found.projection == 10


def test_rows_that_do_not_fit_are_not_made(quick, monkeypatch):
    monkeypatch.setattr(planning, "time_steps", None)  # would be an error
    plan = dome.plan(small_classifier(), 2, None, cross_entropy, *data(), memory=2000)
    assert plan.batch_size == 6
    assert "give a batch that fits" in str(plan)


def test_neither_a_batch_nor_its_size_is_refused():
    with pytest.raises(ValueError, match="give batch_size, or a batch"):
        dome.plan(small_classifier(), 2)


@pytest.mark.slow
def test_the_process_time_of_a_step_is_about_what_was_planned():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 10))
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(32, 300, generator=rng)
        y = torch.randint(10, (32,), generator=rng)
        clock = time.process_time
        plan = dome.plan(model, 40, None, cross_entropy, x, y, clock=clock)
        grad_filter, taken = dome.GradientFilter(model, 40), []
        for _ in range(16):
            x = torch.randn(32, 300, generator=rng)
            start = clock()
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            grad_filter.step()
            taken.append(clock() - start)
    finally:
        torch.set_num_threads(threads)
    added = sorted(taken[4:])[4] - plan.plain
    # dome bench plan holds it to 30 %; a machine with other work is less exact.
    assert 0.4 < plan.choices[0].seconds / added < 2.5
