"""What operations and models take and return: tensors in nested containers."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

# A tensor, a number, a container of them: torch types it no closer.
Value = Any

_CONTAINERS = (dict, tuple, list)
# What most arguments are that are no tensors: asked for first, a call is seen sooner.
_PLAIN = frozenset({int, float, bool, str, type(None)})


_STRIDED = torch.strided  # looked up once: asked for every tensor


def is_dense(t: Tensor) -> bool:
    """Whether a tensor has an entry for every index: not a sparse or nested one."""
    return t.layout is _STRIDED and not t.is_nested


def tensors(value: Value) -> list[Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, _CONTAINERS):
        for part in value.values() if isinstance(value, dict) else value:
            if type(part) in _PLAIN:
                continue
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, _CONTAINERS):
                found += tensors(part)
    return found


def all_tensors(value: Value) -> list[Tensor]:
    """The same inside any mapping and dataclass too, as models take and return."""
    return [t for _, t in named_tensors(value, "")]


def named_tensors(value: Value, name: str) -> list[tuple[str, Tensor]]:
    """The same with the path to each from here, as in ``name['ids'][0].mask``."""
    if isinstance(value, Tensor):
        return [(name, value)]
    parts: list[tuple[str, Value]] = []
    if is_dataclass(value) and not isinstance(value, type):
        found = [field.name for field in fields(value)]
        parts = [(f"{name}.{field}", getattr(value, field)) for field in found]
    elif isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
    return [pair for path, part in parts for pair in named_tensors(part, path)]
