"""The conditions under which a model is called again: same seeds, no traces."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Train or evaluate, or stay as it is; afterwards as it was."""
    modes = {module: module.training for module in model.modules()}
    if training is not None:
        model.train(training)
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, by value and by identity."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in kept:
            if not torch.equal(buffer, values):
                buffer.copy_(values)
            setattr(module, name, buffer)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The same random numbers every time, and the program's own ones afterwards."""
    numpy: Any = sys.modules.get("numpy")
    python, others = random.getstate(), numpy and numpy.random.get_state()
    module: Any = torch.get_device_module(device)
    # A device may draw its numbers on the CPU.
    own = device.type != "cpu" and hasattr(module, "get_rng_state")
    state, on_device = torch.get_rng_state(), own and module.get_rng_state(device)
    try:
        torch.default_generator.manual_seed(seed)
        if own:
            fresh = torch.Generator(device).manual_seed(seed)
            module.set_rng_state(fresh.get_state(), device)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(state)
        if own:
            module.set_rng_state(on_device, device)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(others)
