"""Where runs are computed, decided here and nowhere else."""

import torch


def training_device() -> torch.device:
    """The first GPU if there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """What to write beside results: the GPU's name, or "cpu"."""
    device = training_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
