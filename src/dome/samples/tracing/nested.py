"""What operations and models take and return: tensors in nested containers."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

# A tensor, a number, a container of them: torch types it no closer.
Value = Any

_CONTAINERS = (dict, tuple, list)
# What most arguments are that are no tensors: asked for first, a call is seen sooner.
_PLAIN = frozenset({int, float, bool, str, type(None)})


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
    if isinstance(value, Tensor):
        return [value]
    parts: Value = ()
    if is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple | list):
        parts = value
    return [t for part in parts for t in all_tensors(part)]
