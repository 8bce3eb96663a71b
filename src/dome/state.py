"""A filter's state as a flat dictionary of tensors.

Flat and tensors only, so that it loads with ``torch.load(weights_only=True)`` and with
safetensors. Every tracked parameter is in it by name, with its shape, so that the state
of another model is refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dome.parameters import Layout

PARAMETER, BLOCK, AFTER = "parameters.", "blocks.", "after."


def shapes_of(layout: Layout) -> dict[str, Tensor]:
    """Name and shape of every tracked parameter."""
    return {
        f"{PARAMETER}{slot.name}": torch.tensor(slot.shape, dtype=torch.int64)
        for slot in layout.slots
    }


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same entries under ``prefix``."""
    return {f"{prefix}{name}": value for name, value in state.items()}


def below_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries under ``prefix``, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix)
    }


def stages(after: Sequence[object]) -> dict[str, Tensor]:
    """The states of those stages behind the filter that have one."""
    state: dict[str, Tensor] = {}
    for i, stage in enumerate(after):
        if hasattr(stage, "state_dict"):
            state |= with_prefix(f"{AFTER}{i}.", stage.state_dict())
    return state


def load_stages(after: Sequence[object], state: Mapping[str, Tensor]) -> None:
    """Give each stage behind the filter its state back; all of them, or none."""
    load_together(stage_states(after, state))


def stage_states(
    after: Sequence[object], state: Mapping[str, Tensor]
) -> list[tuple[Any, Mapping[str, Tensor]]]:
    """Each stage behind the filter that takes a state, and that state."""
    pairs = [(s, below_prefix(f"{AFTER}{i}.", state)) for i, s in enumerate(after)]
    return [(s, own) for s, own in pairs if hasattr(s, "load_state_dict")]


def load_together(parts: Iterable[tuple[Any, Mapping[str, Tensor]]]) -> None:
    """Load a state into each of several; if one refuses, all stay as they were."""
    before = []
    try:
        for owner, state in parts:
            own = {name: value.clone() for name, value in owner.state_dict().items()}
            before.append((owner, own))
            owner.load_state_dict(state)
    except BaseException:
        for owner, own in before:
            owner.load_state_dict(own)
        raise


def count_in(state: Mapping[str, Tensor], name: str) -> int:
    """A number of steps out of a state; one that cannot be is refused by name."""
    if name not in state:
        raise ValueError(
            f"the state has no {name!r}: the file is damaged, or not a state"
        )
    value = state[name]
    if value.numel() != 1 or value.is_floating_point() or int(value) < 0:
        raise ValueError(
            f"{name!r} in the state is {value.tolist()}, not a number of steps: the "
            "file is damaged, or not a state"
        )
    return int(value)


def check_model(layout: Layout, state: Mapping[str, Tensor]) -> None:
    """Refuse a state that belongs to other parameters, naming the first."""
    saved = below_prefix(PARAMETER, state)
    if not saved:
        raise ValueError(
            "this is not a state of a GradientFilter: it names no parameters"
        )
    here = {slot.name: tuple(slot.shape) for slot in layout.slots}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} in the state is a {type(value).__name__}, not a tensor: the "
                "file is damaged, or not a state"
            )
    for name, shape in here.items():
        if name not in saved:
            raise ValueError(
                f"the checkpoint has no parameter {name!r}, which is trained here: it "
                "belongs to another model or to other trainable parameters"
            )
        if tuple(saved[name].tolist()) != shape:
            raise ValueError(
                f"parameter {name!r} has shape {shape} here and "
                f"{tuple(saved[name].tolist())} in the checkpoint: another model"
            )
    extra = sorted(set(saved) - set(here))
    if extra:
        raise ValueError(
            f"the checkpoint has parameter {extra[0]!r}, which is not trained here "
            f"({len(extra)} such): it belongs to another model"
        )


def short(names: Mapping[str, object]) -> str:
    """The first few of some names, for a message."""
    listed = ", ".join(repr(name) for name in list(names)[:3])
    return listed + (f" and {len(names) - 3} more" if len(names) > 3 else "")
