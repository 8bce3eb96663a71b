import copy

import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.filter import GradientFilter
from dome.options import FilterOptions
from dome.parameters import Layout
from dome.world import Alone


def alone(model, **options):
    chosen = FilterOptions(rank=4, **options)
    return Alone(model, Layout(model, chosen.layout), chosen)


class Pair:
    """Two models of one process, each with half of a batch; all is held here."""

    def __init__(self, first, second):
        own, self._other = alone(first), alone(second)
        self._own = own
        self.layout, self.options, self.masks = own.layout, own.options, own.masks
        self.source, self.tracker = own.source, own.tracker
        self.attached = (*own.attached, *self._other.attached)
        self.total, self.zeros, self.stats = own.total, own.zeros, own.stats
        self.state, self.held = own.state, own.held

    def meet(self, step, own):
        other = self._other.source.take()
        self._other.source.arm(True)
        return torch.cat([own, other]), self.options.sample_scale(len(own))

    def gradient(self):
        return (self._own.gradient() + self._other.gradient()) / 2

    def put_(self, filtered):
        self._own.put_(filtered)
        self._other.put_(filtered)


def test_the_filter_in_the_world_of_one_process_is_the_filter(rng):
    models = [small_classifier(), small_classifier()]
    filters = [dome.GradientFilter(models[0], 4), None]
    filters[1] = GradientFilter.in_world(alone(models[1]))
    for x, y in batches(rng, 5):
        for model, grad_filter in zip(models, filters, strict=True):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            grad_filter.step()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert filters[0].stats.kept_norm == filters[1].stats.kept_norm


def test_a_world_of_two_models_equals_one_process_with_the_whole_batch(rng):
    one, first = small_classifier(), small_classifier()
    second = copy.deepcopy(first)
    whole = dome.GradientFilter(one, 4)
    pair = GradientFilter.in_world(Pair(first, second))
    for x, y in batches(rng, 6):
        for model, part in (
            (one, slice(None)),
            (first, slice(0, None, 2)),
            (second, slice(1, None, 2)),
        ):
            model.zero_grad()
            cross_entropy(model(x[part]), y[part]).backward()
        whole.step()
        pair.step()
        for p, *others in zip(
            one.parameters(), first.parameters(), second.parameters(), strict=True
        ):
            for q in others:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9)
    state = pair.state_dict()
    whole.load_state_dict(state)
    again = whole.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    pair.detach()
    assert not pair.is_attached
