"""Random numbers named by a seed and a step, the same wherever they are drawn.

A step's generator is made from (seed, step) alone: workers draw the same numbers
without sending them, and a resumed run goes on with those it would have drawn.
"""

import hashlib

import torch
from torch import Tensor

from dome.compression.packing import unpack_bits

DEFAULT_SEED = 0x736B6574  # not 0: a user's own seed 0 must not give the same noise
CPU = torch.device("cpu")


def generator_of(
    seed: int, step: int, worker: int = 0, device: torch.device = CPU
) -> torch.Generator:
    """The generator of a seed, a step and a worker, on a device."""
    name = f"{seed} {step} {worker}".encode()
    # torch's CPU generator takes 32 bits of its seed.
    key = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")
    return torch.Generator(device).manual_seed(key)


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
