"""Arithmetic that is the same wherever it is called from."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from dome.torch_private import no_autocast

P = ParamSpec("P")
R = TypeVar("R")


def own_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without a graph, and in the precision of its own tensors.

    A step or backward pass may be called under autocast, where products of float32
    numbers keep 8 bits.
    """

    @wraps(function)
    def undisturbed(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), no_autocast():
            return function(*args, **kwargs)

    return undisturbed


def rounding(t: Tensor) -> float:
    """Relative size of a rounding in products of such numbers, as torch is set now.

    0 for integers, whose products are exact.
    """
    if not (t.is_floating_point() or t.is_complex()):
        return 0.0
    kind = t.device.type
    dtypes = [t.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    if t.dtype in (torch.float32, torch.complex64):
        dtypes.append(float32_products(kind))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def float32_products(kind: str) -> torch.dtype:
    """The type whose digits products of float32 numbers keep on a kind of device.

    float16 stands for TF32, which has as many.
    """
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        is_medium = torch.get_float32_matmul_precision() == "medium"
        return _KEPT["bf16" if is_medium and kind == "cpu" else _older(kind)]
    given = {attrgetter(name)(torch.backends) for name in _SWITCHES.get(kind, ())}
    return next((t for name, t in _KEPT.items() if name in given), torch.float32)


def _older(kind: str) -> str:
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return "tf32" if kind == "cuda" and any(flags) else "ieee"


_SWITCHES = {
    "cpu": [f"mkldnn.{op}.fp32_precision" for op in ("matmul", "conv", "rnn")],
    "cuda": [
        *("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"),
        "cudnn.rnn.fp32_precision",
    ],
}
_KEPT = {"bf16": torch.bfloat16, "tf32": torch.float16, "ieee": torch.float32}
