"""A packed sequence as a model's input: its rows are samples' by number."""

import torch
from torch.nn.utils.rnn import PackedSequence

from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value


def packed_in(value: Value) -> PackedSequence | None:
    """The first packed sequence inside nested inputs."""
    if isinstance(value, PackedSequence):
        return value
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | tuple | list):
        return None
    return next((p for v in inside if (p := packed_in(v)) is not None), None)


def sequences_of(packed: PackedSequence) -> Labels:
    """Which sequence every row of its data belongs to, as they came."""
    data, sizes = packed.data, packed.batch_sizes
    # Rows lie time by time, and those of one time by falling length.
    ids = torch.cat([torch.arange(int(n)) for n in sizes]).to(data.device)
    if packed.sorted_indices is not None:
        ids = packed.sorted_indices[ids]
    return Labels(ids.view(-1, *(1,) * (data.ndim - 1)), int(sizes[0]))
