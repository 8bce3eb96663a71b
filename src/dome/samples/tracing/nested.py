"""What operations and models take and return: tensors in nested containers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

# A tensor, a number, a container of them: torch types it no closer.
Value = Any


def tensors(value: Value) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _inside(value.values())
    elif isinstance(value, tuple | list):
        yield from _inside(value)


def _inside(values: Iterable[Value]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors(value)


def unpacked(value: Value) -> Value:
    """Nested tuples, mappings and dataclasses as lists and dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return [unpacked(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return {key: unpacked(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [unpacked(v) for v in value]
    return value
