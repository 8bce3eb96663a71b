"""What is computed on a device, held against the same on the CPU."""

import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def moved(value, place):
    """Tensors anywhere inside, on another device."""
    return tree_map_only(torch.Tensor, lambda t: t.to(place), value)


def assert_agree(there, here, dtype):
    """The same numbers, relative to the largest of each tensor."""
    there, here = moved(there, "cpu"), moved(here, "cpu")

    def unit(tensor):
        finite = tensor.detach().double().abs().flatten()
        return float(finite.max()) if finite.numel() else 1.0

    assert type(there) is type(here)
    if isinstance(here, torch.Tensor):
        limit = TOLERANCE[dtype]
        assert_close(there, here, rtol=limit, atol=limit * unit(here))
    elif isinstance(here, float):
        assert_close(there, here, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    elif isinstance(here, dict):
        assert there.keys() == here.keys()
        for name in here:
            assert_agree(there[name], here[name], dtype)
    elif isinstance(here, list | tuple):
        for a, b in zip(there, here, strict=True):
            assert_agree(a, b, dtype)
    else:
        assert there == here
