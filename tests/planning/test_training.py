from dataclasses import replace

import pytest
import torch
from models import small_classifier
from torch import nn

import dome
from dome.planning import training as planning
from dome.planning.memory import num_outputs
from dome.planning.training import Choice, Plan, update_flops
from dome.planning.trial import UpdateTimes
from dome.trackers.factors import Product


def test_memory_is_basis_and_samples_and_little_else():
    model = nn.Linear(2000, 500, bias=False)
    plan = dome.plan(model, rank=50, batch_size=20)
    floor = 4 * 1_000_000 * (50 + 20)
    full, half = plan.choices[:2]
    assert floor < full.memory < 1.25 * floor
    assert full.memory - half.memory == 2 * 1_000_000 * 50
    assert all(choice.seconds > 0 for choice in plan.choices)


def test_layerwise_takes_less_memory_where_layers_are_small():
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(20)])
    plan = dome.plan(model, rank=300, batch_size=10)
    by_layout = {(c.layout, c.storage): c for c in plan.choices}
    wide = by_layout["global", "float32"]
    narrow = by_layout["layerwise", "float32"]
    assert narrow.memory < wide.memory


def test_a_stream_has_the_samples_of_one_layer():
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(20)])
    plan = dome.plan(model, rank=3, batch_size=50, memory=10_000_000)
    by_storage = {c.storage: c for c in plan.choices if c.layout == "layerwise"}
    kept, streamed = by_storage["float32"], by_storage["float32, stream"]
    assert kept.memory - streamed.memory == 4 * 50 * 19 * 10_100
    assert not kept.fits
    assert plan.suggestion.endswith("basis_dtype=torch.float32, stream=True)")
    assert kept.seconds == streamed.seconds


def test_flops_grow_linearly_in_parameters():
    assert update_flops(2000, 10, 30) == 2 * update_flops(1000, 10, 30)


def test_the_suggestion_is_the_first_choice_that_fits_or_a_rank_that_would():
    big = Choice("global", torch.float32, 1000, 1.0, fits=False, largest_rank=3)
    small = Choice("layerwise", torch.bfloat16, 100, 1.0, fits=True)
    plan = Plan(dim=100, rank=9, batch_size=1, available=500, choices=(big, small))
    assert 'layout="layerwise", basis_dtype=torch.bfloat16' in plan.suggestion
    assert "does not fit" in str(plan)
    none = Plan(dim=100, rank=9, batch_size=1, available=500, choices=(big,))
    assert none.suggestion == (
        "nothing fits at rank 9: attach(..., rank=3, "
        'layout="global", basis_dtype=torch.float32) would'
    )
    none_at_all = replace(big, largest_rank=0)
    hopeless = Plan(100, 9, 1, available=10, choices=(none_at_all,))
    assert "smaller batch" in hopeless.suggestion


def test_the_largest_rank_is_the_last_that_fits(monkeypatch):
    monkeypatch.setattr(planning, "time_updates", lambda *_: UpdateTimes(1.0, 1.0))
    model, memory = nn.Linear(300, 100), 20_000_000
    for choice in dome.plan(model, 5, 8, memory=memory).choices:
        assert choice.largest_rank > 5
        at = dome.plan(model, choice.largest_rank, 8, memory=memory)
        beyond = dome.plan(model, choice.largest_rank + 1, 8, memory=memory)
        kinds = [(c.layout, c.storage) for c in at.choices]
        place = kinds.index((choice.layout, choice.storage))
        assert at.choices[place].fits
        assert not beyond.choices[place].fits
    assert dome.plan(model, 5, 8, memory=1000).choices[0].largest_rank == 0


def test_steps_between_updates_take_the_projection_only():
    choice = Choice("global", torch.float32, 1, 1.0, fits=True, projection=0.2)
    assert choice.seconds_with(1) == 1.0
    assert choice.seconds_with(4) == pytest.approx(0.4)
    # Four steps: one with the update, four projections.
    assert 4 * choice.seconds_with(4) == pytest.approx(0.8 + 4 * 0.2)
    measured = dome.plan(small_classifier(), rank=5, batch_size=3).choices
    assert all(0 < c.projection <= c.seconds for c in measured)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="rank must be between 1 and 195, got 500"):
        dome.plan(small_classifier(), rank=500, batch_size=3)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        dome.plan(small_classifier(), rank=5, batch_size=0)
    with pytest.raises(ValueError, match="memory must be at least 1 byte, got 0"):
        dome.plan(small_classifier(), rank=5, batch_size=3, memory=0)
    with pytest.raises(ValueError, match="positions must be at least 1, got 0"):
        dome.plan(small_classifier(), rank=5, batch_size=3, positions=0)


class Language(nn.Module):
    """An embedding that is the head's weight too, and a linear layer between."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(700, 100)
        self.body = nn.Linear(100, 700)
        self.back = nn.Linear(700, 100)
        self.small = nn.Linear(100, 100)
        self.head = nn.Linear(100, 700, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.small(self.back(self.body(self.words(x)))))


def test_output_gradients_are_counted_as_they_are_kept():
    B, T, model = 3, 20, Language()
    grad_filter = dome.GradientFilter(model, 5, direction_rank=4)
    with grad_filter:
        model(torch.randint(700, (B, T))).square().sum().backward()
        batch = grad_filter._source.take_compact()
    kept = [use.grads for uses in batch.uses.values() for use in uses]
    products = [grads for grads in kept if isinstance(grads, Product)]
    tensors = [t for p in products for side in (p.left, p.right) for t in side.tensors]
    inputs = B * T * (1 + 100 + 700 + 100)  # a word's number; the small layer has rows
    assert sum(t.numel() for t in tensors) - inputs == B * num_outputs(model, T)


def test_positions_cost_directions_of_low_rank_and_nothing_else():
    model = Language()
    short, long = (
        dome.plan(model, 5, 3, positions=T, memory=10_000_000).choices for T in (1, 21)
    )
    for before, after in zip(short[:-1], long[:-1], strict=True):
        assert before.memory == after.memory
    outputs = 100 + 700 + 100 + 700
    assert long[-1].memory - short[-1].memory == 4 * 3 * 20 * outputs
    assert 5 < long[-1].largest_rank < short[-1].largest_rank


def test_directions_of_low_rank_are_suggested_where_no_other_basis_fits():
    model = nn.Sequential(nn.Linear(2000, 500), nn.Linear(500, 500))
    plan = dome.plan(model, rank=50, batch_size=20, memory=20_000_000)
    assert [choice.fits for choice in plan.choices] == [*[False] * 6, True]
    assert plan.suggestion == 'attach(..., layout="global", direction_rank=4)'
    tracker = dome.GradientFilter(model, 50, direction_rank=4).trackers["all"]
    stored = 4 * tracker.num_stored
    assert 3 * stored < plan.choices[-1].memory < 6 * stored
