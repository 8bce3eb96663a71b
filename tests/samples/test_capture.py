import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from samples.loop import per_sample_loop, sum_loss
from samples.models import Then
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample, per_sample_gradients

pytestmark = pytest.mark.usefixtures("float64")


def sources(model, *parts):
    return [PerSample(model, Layout(model, only=part)) for part in parts]


def backward(model, x):
    sum_loss(model(x)).backward()


def matrices_and_rest(model):
    return (
        [p for p in model.parameters() if p.ndim == 2],
        [p for p in model.parameters() if p.ndim != 2],
    )


def test_two_sources_of_one_model_each_get_their_own_columns(model):
    x = torch.randn(5, 3)
    expected = per_sample_loop(model, [x])
    columns = Layout(model).slots
    matrices, rest = sources(model, *matrices_and_rest(model))
    backward(model, x)
    for source, dims in ((matrices, 2), (rest, 1)):
        own = [expected[:, c.start : c.stop] for c in columns if len(c.shape) == dims]
        assert_close(source.take(), torch.cat(own, 1))


def test_sources_that_want_the_same_parameters_both_get_them(model):
    x = torch.randn(5, 3)
    expected = per_sample_loop(model, [x])
    everything, head = sources(model, model.parameters(), model[2].parameters())
    backward(model, x)
    assert_close(head.take(), expected[:, 16:])
    assert_close(everything.take(), expected)


def test_hooks_are_registered_once_and_go_with_the_last_source(model):
    first, second = sources(model, *matrices_and_rest(model))
    assert len(model._forward_hooks) == 1
    assert len(model._forward_pre_hooks) == 2  # one is where the compiler stops
    first.detach()
    backward(model, torch.randn(4, 3))
    assert len(second.take()) == 4
    second.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_source_that_rests_costs_the_other_nothing_and_gets_nothing(model):
    matrices, rest = sources(model, *matrices_and_rest(model))
    matrices.arm(False)
    x = torch.randn(4, 3)
    backward(model, x)
    assert matrices.take() is None
    assert len(rest.take()) == 4
    model.zero_grad()
    matrices.arm(True)
    backward(model, x)
    assert len(matrices.take()) == len(rest.take()) == 4


def test_one_source_a_parameter_may_take_inside_backward(model):
    # One optimizer a parameter, which steps as soon as its gradient is there.
    x, taken = torch.randn(4, 3), {}
    expected = per_sample_loop(model, [x])
    for p in model.parameters():
        (source,) = sources(model, [p])

        def step(p, source=source):
            taken[id(p)] = source.take().clone()
            p.grad = None

        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        taken.clear()
        backward(model, x)
        rows = torch.cat([taken[id(p)] for p in model.parameters()], 1)
        assert_close(rows, expected)


def test_the_functional_form_runs_beside_two_sources(model):
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    first, second = sources(model, *matrices_and_rest(model))
    F.cross_entropy(model(x), y).backward()
    G = per_sample_gradients(model, F.cross_entropy, x[:3], y[:3])
    assert G.shape == (3, 26)
    assert len(first.take()) == len(second.take()) == 5


def test_sources_of_one_model_must_agree_on_the_batch_dimension(model):
    source = PerSample(model, Layout(model), batch_dim=1)
    with pytest.raises(ValueError, match=r"along dimension 1 .* along 0"):
        PerSample(model, Layout(model), batch_dim=0)
    PerSample(model, Layout(model)).detach()
    source.detach()
    PerSample(model, Layout(model), batch_dim=0)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2), lambda: nn.EmbeddingBag(5, 3)]
)
def test_a_model_that_is_dropped_is_freed_with_its_capture(make):
    model = make()
    source = PerSample(model, Layout(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="the model of this filter is gone"):
        source.watch(torch.ones(2, 3)).__enter__()


def test_a_copy_of_a_captured_model_gets_a_capture_of_its_own(model, source):
    twin, x = copy.deepcopy(model), torch.randn(4, 3)
    own = PerSample(twin, Layout(twin))
    backward(twin, x)
    assert source.take() is None
    assert len(own.take()) == 4


class TimesAnother(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, factor=None):
        x = x if factor is None else x * factor
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("size", [1, 5])
def test_calls_of_other_inputs_between_calls_alike_change_nothing(size):
    model = TimesAnother()
    source = PerSample(model, Layout(model))
    x, factor = torch.randn(size, 3), torch.randn(size, 3)
    for given in [(x,), (x,), (x, factor), (x,), (x[:1],), (x,)]:
        whole = given if len(given) == 1 else (given[0] * given[1],)
        expected = per_sample_loop(model, whole)
        sum_loss(model(*given)).backward()
        assert_close(source.take(), expected)
        model.zero_grad()


def test_another_thread_may_evaluate_the_model_meanwhile():
    inside, goes_on = threading.Event(), threading.Event()

    def run(m, x):
        if not torch.is_grad_enabled():
            inside.set()
            goes_on.wait(60)
        return m.layer(x)

    model, x = Then(run, layer=nn.Linear(3, 2)), torch.randn(4, 3)
    source = PerSample(model, Layout(model))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(torch.no_grad()(model), x)
        assert inside.wait(60)
        sum_loss(model(x)).backward()
        goes_on.set()
        other.result()
    assert_close(source.take().sum(0), Layout(model).gather())
    source.detach()


def test_two_threads_that_train_at_once_are_refused():
    def run(m, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, x).result()
        return m.layer(x)

    model = Then(run, layer=nn.Linear(3, 2))
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"two threads.*no_grad"):
        model(torch.randn(4, 3))
    source.detach()
