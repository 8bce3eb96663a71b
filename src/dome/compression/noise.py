"""Random numbers named by a seed and a step, the same wherever they are drawn.

A step's generator is made from (seed, step) alone: workers draw the same numbers
without sending them, and a resumed run goes on with those it would have drawn.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from dome.compression.packing import unpack_bits

DEFAULT_SEED = 0x736B6574  # not 0: a user's own seed 0 must not give the same noise
CPU = torch.device("cpu")


class Noise:
    """Counts the steps of a compressor, and gives each its generator.

    Args:
        seed: Any integer that is not negative.
        worker: Sets apart the noise of workers with the same seed.
    """

    def __init__(self, seed: int, worker: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.seed, self.worker = seed, worker
        self.step = 0

    def advance(self) -> None:
        """Go on to the next step: a message of this one was made."""
        self.step += 1

    def generator(self, step: int, device: torch.device = CPU) -> torch.Generator:
        """The generator of a step. Numbers differ between kinds of devices."""
        name = f"{self.seed} {step} {self.worker}".encode()
        # torch's CPU generator takes 32 bits of its seed.
        key = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")
        return torch.Generator(device).manual_seed(key)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of the next step."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on at a saved step."""
        if "step" not in state:
            raise ValueError(
                f"this is no state of a compressor with noise: it has no 'step', only "
                f"{sorted(state)}"
            )
        step = state["step"]
        if step.numel() != 1 or step.is_floating_point() or int(step) < 0:
            raise ValueError(
                f"'step' in the state of a compressor is {step.tolist()}, not a number "
                f"of steps: the file is damaged; go back to an older one"
            )
        self.step = int(step)


class Silence:
    """In place of ``Noise`` where a message depends on the vector alone."""

    step = 0

    def advance(self) -> None:
        """All steps are step 0."""

    def state_dict(self) -> dict[str, Tensor]:
        """An empty dictionary."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Any state will do: there is none to restore."""


def random_signs(count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Fair signs ±1, shape (count,), with the dtype and device of ``like``.

    Drawn on the CPU, 64 a number, and moved as bits: the same on every device.
    """
    words = torch.empty(-(-count // 64), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    packed = words.view(torch.uint8).to(like.device, non_blocking=True)
    return 1 - 2 * unpack_bits(packed, count).to(like.dtype)


def random_subset(total: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` different indices below ``total``, sorted; every set equally likely.

    Indices are drawn until there are as many different ones as wanted. No index is
    preferred, so no set is. O(total) bytes, O(count) draws, on the CPU.
    """
    inverse = 2 * count > total
    missing = total - count if inverse else count
    wanted, chosen = missing, torch.zeros(total, dtype=torch.bool)
    while missing:
        chosen[torch.randint(total, (missing,), generator=generator)] = True
        missing = wanted - int(chosen.count_nonzero())
    return (~chosen if inverse else chosen).nonzero().squeeze(1)
