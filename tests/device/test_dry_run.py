"""The tests for a GPU, run without one: on the simulated device, on the CPU, or faked.

What they find there says nothing of a GPU; that they run says that they can be run.
"""

import contextlib
import warnings

import pytest
import torch
from device import test_cuda

import dome


@pytest.fixture
def place(simulated, monkeypatch):
    """The simulated device in the place of CUDA."""
    monkeypatch.setattr(test_cuda, "PLACE", simulated.name)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    return simulated.name


def test_forward_and_backward(place):
    test_cuda.test_forward_and_backward_do_not_wait()


@pytest.mark.parametrize("options", [{}, {"layout": "layerwise"}, {"tracker": "svd"}])
def test_resuming(options, tmp_path, monkeypatch):
    # No file holds a tensor of a device that is written in Python.
    monkeypatch.setattr(test_cuda, "PLACE", "cpu")
    test_cuda.test_a_run_resumes_bit_for_bit(options, tmp_path)


def test_agreement(place):
    test_cuda.test_a_gpu_says_what_the_processor_says()


@pytest.mark.filterwarnings("ignore:called a synchronizing")
@pytest.mark.parametrize("options", [{}, {"layout": "layerwise"}])
@pytest.mark.parametrize("num_waits", [1, 9])
def test_counting_of_waits(options, num_waits, place, monkeypatch):
    original = torch.optim.SGD.step

    def step(self, closure=None):
        for i in range(num_waits):
            warnings.warn(f"called a synchronizing operation {i}", stacklevel=2)
        return original(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    right = (
        contextlib.nullcontext() if num_waits == 1 else pytest.raises(AssertionError)
    )
    with right:
        test_cuda.test_a_step_waits_as_often_as_on_the_simulated_device(options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (0.5, False), (2.0, False)])
def test_memory(dtype, share, holds, place, monkeypatch):
    narrow = torch.nn.Linear(512, 10).to(place)
    monkeypatch.setattr(test_cuda, "wide", lambda: narrow)
    predicted = next(
        choice.memory
        for choice in dome.plan(narrow, 32, 32).choices
        if choice.layout == "global" and choice.basis_dtype == dtype
    )
    peaks = [share * predicted, 0]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks.pop(0))
    with contextlib.nullcontext() if holds else pytest.raises(AssertionError):
        test_cuda.test_peak_memory_is_what_the_plan_says(dtype)


def test_a_scaler(monkeypatch):
    monkeypatch.setattr(test_cuda, "PLACE", "cpu")
    monkeypatch.setattr(test_cuda, "KIND", "cpu")
    test_cuda.test_a_step_that_the_scaler_skips_leaves_the_basis_alone()
    test_cuda.test_autocast_with_a_scaler_trains_as_without()


@pytest.mark.slow
def test_two_workers():
    test_cuda.two_workers_train_as_one("gloo")
