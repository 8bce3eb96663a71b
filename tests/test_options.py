import inspect
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
import torch
from models import small_classifier
from torch.optim import SGD

import dome
import dome.distributed
from dome.compression import TopK
from dome.integrations import accelerate
from dome.options import FilterOptions, Options

IN_ONE_PROCESS = {"samples", "stream", "scaler"}

BAD = {
    "a number after": ({"after": 5}, "after must be a function of .* got 5"),
    "a name after": ({"after": "clip"}, "after must be a function of .* got 'clip'"),
    "nothing in a list": ({"after": [None]}, r"list of them, got \[None\]"),
    "a class after": ({"after": TopK}, r"the class TopK: .* TopK\(\.\.\.\)"),
    "a word of strength": ({"strength": "half"}, "strength must lie .* got 'half'"),
    "no strength": ({"strength": None}, "strength must lie .* got None"),
    "a schedule of two": ({"strength": lambda step, loss: 1.0}, "of the step alone"),
    "a word to forget": ({"forget": "slowly"}, "forget must be None .* got 'slowly'"),
    "a seed": ({"generator": 3}, r"torch\.Generator, got 3: give .*manual_seed"),
    "a dtype by name": ({"basis_dtype": "float32"}, "dtype must be one of .*'float32'"),
    "a list of layouts": ({"layout": ["global"]}, r"layout must be one of .*\['global"),
    "a word for a flag": ({"allow_mixing": "no"}, "True or False, got 'no'"),
    "a scale": ({"scaler": 4}, "GradScaler in use, got 4"),
}
bad_options = pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)


def callbacks():
    # Lightning warns on import.
    lightning = pytest.importorskip("dome.integrations.lightning")
    transformers = pytest.importorskip("dome.integrations.transformers")
    return lightning.DomeCallback, transformers.DomeTrainerCallback


@bad_options
def test_a_bad_option_is_refused_at_attach(options, message):
    model = small_classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    for attach in (dome.attach, accelerate.attach):
        with pytest.raises(ValueError, match=message):
            attach(model, optimizer, 3, **options)
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.filterwarnings("ignore")  # Lightning's, on import
@bad_options
def test_a_bad_option_is_refused_where_a_callback_is_made(options, message):
    for callback in callbacks():
        with pytest.raises(ValueError, match=message):
            callback(rank=3, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"rank": "many"}, ValueError, "rank must be a whole number, got 'many'"),
        ({"rank": 3, "strenght": 1}, TypeError, "did you mean 'strength'"),
        ({"rank": 3, "compressor": "topk"}, ValueError, "compressor must be an object"),
        (
            {"rank": 3, "compressor": TopK(2), "share": "all"},
            ValueError,
            'share must be "own"',
        ),
    ],
)
def test_a_callback_checks_all_of_its_arguments(arguments, error, message):
    for callback in callbacks():
        with pytest.raises(error, match=message):
            callback(**arguments)


@pytest.mark.filterwarnings("ignore")
def test_a_callback_takes_the_options_of_one_process_and_of_workers():
    for callback in callbacks():
        callback(rank=3, samples="worker", compressor=TopK(2), share=10)
        callback(rank={"0": 2}, samples="microbatch", parameters="0.*", after=None)


def test_none_after_is_nothing(rng):
    model, x = small_classifier(), torch.randn(6, 8, generator=rng)
    optimizer = SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, 3, after=None)
    model(x[:, : model[0].in_features].double()).sum().backward()
    optimizer.step()
    assert grad_filter.stats.step == 1


def test_a_schedule_is_told_what_it_returned():
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 3, strength=lambda step: "all")
    with pytest.raises(ValueError, match=r"function of the step .* got 'all'"):
        grad_filter.filter_()


ATTACHES = {
    "dome": dome.attach,
    "workers": dome.distributed.attach,
    "accelerate": accelerate.attach,
    "private": lambda model, optimizer, rank: dome.privacy.attach(
        model, optimizer, rank, 1.0, 1.0, sample_rate=0.1, basis="released"
    ),
}


@pytest.mark.parametrize("attach", ATTACHES.values(), ids=ATTACHES)
def test_model_and_optimizer_that_are_none_are_refused_by_name(attach):
    model = small_classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    for arguments, message in (
        ((optimizer, model), "model and optimizer are swapped: got SGD"),
        ((torch.nn.Linear, optimizer), "Module, got the class Linear"),
        ((model.parameters(), optimizer), "Module, got generator"),
        ((model, SGD), "Optimizer, got the class SGD"),
        ((model, None), "Optimizer, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(*arguments, 3)


@pytest.mark.parametrize("parameters", [3, torch.zeros(2)])
def test_parameters_that_are_no_list_are_refused(parameters):
    with pytest.raises(ValueError, match="parameters must be a list of tensors, names"):
        dome.GradientFilter(small_classifier(), 3, parameters=parameters)


def test_editors_are_told_the_options_that_are_checked():
    checked = {field.name: field.type for field in fields(FilterOptions)}
    for name in {"rank"} | IN_ONE_PROCESS:
        del checked[name]
    hints = inspect.get_annotations(Options)
    assert list(hints) == list(checked)
    assert hints == checked
    for function in (
        dome.attach,
        dome.GradientFilter.__init__,
        dome.distributed.attach,
    ):
        assert get_args(get_type_hints(function)["options"]) == (Options,)
    assert get_type_hints(accelerate.TrainerOptions).keys() >= hints.keys()
