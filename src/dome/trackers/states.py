"""What a tracker's state must have, checked before anything is taken from it."""

from collections.abc import Mapping

import torch
from torch import Tensor

SIZES = ("num_", "norms", "values", "leading_eigenvalues", "orthogonality", "doubt")

ROUNDING = 1e-6  # of small matrices in float64, with much to spare


def translated(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state with today's names; those of version 0.1 called Q "mix"."""
    if "mix" not in state:
        return state
    return {"Q" if name == "mix" else name: value for name, value in state.items()}


def check_small(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse a state whose small entries cannot be those of a tracker.

    Args:
        state: What is to be loaded.
        own: The same entries of the tracker that would load them.
    """
    for name, here in own.items():
        if name not in state:
            raise ValueError(
                f"the state has no {name!r}: it was written by another tracker, use "
                f"the same tracker and oversample"
            )
        there = state[name]
        if not isinstance(there, Tensor) or there.dtype != here.dtype:
            found = getattr(there, "dtype", type(there).__name__)
            raise ValueError(
                f"{name!r} in the state is stored as {found}, not as {here.dtype}: "
                f"{DAMAGED}"
            )
        if there.shape != here.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(there.shape)} in the state and "
                f"{tuple(here.shape)} here: use the same rank, oversample and "
                f"direction_rank"
            )
        _check_values(name, there)


def _check_values(name: str, there: Tensor) -> None:
    """Refuse numbers that an entry of a state cannot have."""
    if not there.isfinite().all():
        raise ValueError(f"{name!r} in the state is not finite: {DAMAGED}")
    if name.startswith(SIZES) and bool((there < 0).any()):
        raise ValueError(
            f"{name!r} in the state is negative ({there.min().item()}): {DAMAGED}"
        )
    if name == "arbitrary" and bool((there.diagonal() < -ROUNDING).any()):
        raise ValueError(f"{name!r} in the state is not a Gram matrix: {DAMAGED}")
    if name == "leading":
        error = there.T @ there - torch.eye(there.shape[1]).to(there)
        if not error.abs().max() <= ROUNDING:
            raise ValueError(f"{name!r} in the state is not orthonormal: {DAMAGED}")


DAMAGED = "the file is damaged, or not a state of a tracker; go back to an older one"


def draw_seed(generator: torch.Generator | None) -> int:
    """The seed of every random direction of a tracker."""
    if generator is None:
        return 0x646F6D65  # not 0: a user's own seed 0 must not give the same ones
    device = generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))
