"""The device and the random numbers of runs, chosen here and nowhere else.

Arms of a seed that differ in nothing but the filter draw the same initial weights, the
same order of samples and the same sketch noise, because no stream reads another's.
"""

import torch


def training_device() -> torch.device:
    """The first GPU if there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """What to write beside results: the GPU's name, or "cpu"."""
    device = training_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


INITIAL_WEIGHTS, SAMPLE_ORDER, SKETCH_NOISE, FIRST_BASIS = range(4)


def generator(
    seed: int, stream: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """The generator of one stream of a seed."""
    return torch.Generator(device).manual_seed(1_000_003 * stream + seed)
