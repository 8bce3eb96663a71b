"""A filter's state as a flat dictionary of tensors.

Flat and tensors only, so that it loads with ``torch.load(weights_only=True)`` and with
safetensors. Every tracked parameter is in it by name, with its shape, so that the state
of another model is refused by name.
"""

from collections.abc import Mapping, Sequence

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
    """Give each stage behind the filter its state back."""
    for i, stage in enumerate(after):
        if hasattr(stage, "load_state_dict"):
            stage.load_state_dict(below_prefix(f"{AFTER}{i}.", state))


def check_model(layout: Layout, state: Mapping[str, Tensor]) -> None:
    """Refuse a state that belongs to other parameters, naming the first."""
    saved = below_prefix(PARAMETER, state)
    if not saved:
        raise ValueError(
            "this is not a state of a GradientFilter: it names no parameters"
        )
    here = {slot.name: tuple(slot.shape) for slot in layout.slots}
    for name, shape in here.items():
        if name not in saved:
            raise ValueError(
                f"the checkpoint does not know parameter {name!r}, which is trained "
                f"here: it belongs to another model or to other trainable parameters"
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


def check_blocks(
    own: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor]
) -> None:
    """Refuse a state whose blocks, ranks or storage differ, before any is loaded.

    Args:
        own: The present state of every block's tracker.
        state: The checkpoint.
    """
    saved = {
        name.removeprefix(BLOCK).removesuffix(".basis"): value
        for name, value in state.items()
        if name.startswith(BLOCK) and name.endswith(".basis")
    }
    if set(saved) != set(own):
        raise ValueError(
            f"the checkpoint has bases for {_short(saved)}, this filter for "
            f"{_short(own)}: use the same layout and rank"
        )
    for name, entries in own.items():
        there, here = saved[name], entries["basis"]
        if there.shape != here.shape:
            raise ValueError(
                f"the basis of {name!r} tracks {there.shape[1]} directions in the "
                f"checkpoint and {here.shape[1]} here: use the same rank and oversample"
            )
        if there.dtype != here.dtype:
            raise ValueError(
                f"the basis of {name!r} is stored as {there.dtype} in the checkpoint, "
                f"as {here.dtype} here: use the same basis_dtype"
            )
        missing = sorted(key for key in entries if f"{BLOCK}{name}.{key}" not in state)
        if missing:
            raise ValueError(
                f"the checkpoint of {name!r} has no {missing[0]!r}: it was written by "
                f"another tracker, use the same tracker and oversample"
            )


def _short(names: Mapping[str, object]) -> str:
    listed = ", ".join(repr(name) for name in list(names)[:3])
    return listed + (f" and {len(names) - 3} more" if len(names) > 3 else "")
