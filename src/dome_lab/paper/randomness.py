"""The streams of random numbers of a seed, one generator each.

Arms of a seed that differ in nothing but the filter draw the same initial weights, the
same order of samples and the same sketch noise, because no stream reads another's.
"""

import torch

INITIAL_WEIGHTS, SAMPLE_ORDER, SKETCH_NOISE, FIRST_BASIS = range(4)


def generator(
    seed: int, stream: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The generator of one stream of a seed."""
    return torch.Generator(device).manual_seed(1_000_003 * stream + seed)
