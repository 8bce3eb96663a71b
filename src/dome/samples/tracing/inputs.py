"""Where the inputs of a model hold its samples.

A sample is an entry along one dimension of the tensors that the model is called with.
Three other kinds of input are recognised:

- bags: ``(indices, offsets)`` of a model with an ``EmbeddingBag``; a sample is a bag;
- a packed sequence; a sample is a sequence;
- graphs in one batch, as PyTorch Geometric stacks them, where a vector names each
  node's: arguments named ``batch`` and ``edge_index``, or one object that has both as
  attributes; a sample is a graph.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value, all_tensors
from dome.samples.tracing.origins import Place


@dataclass(frozen=True, slots=True)
class Inputs:
    """The samples that a model is called with.

    Attributes:
        num_samples: B.
        places: Where each tensor holds them; those that hold none are left out.
        spaces: Ids of rows by their number, for rows that nothing was written to.
    """

    num_samples: int
    places: list[tuple[Tensor, Place]]
    spaces: dict[int, Tensor] = field(default_factory=dict)


def inputs_of(
    model: nn.Module,
    args: Value,
    kwargs: Value,
    batch_dim: int,
    last_offset: bool | None,
) -> Inputs:
    """The samples among the arguments of a model.

    Args:
        model: The model.
        args: What it is called with.
        kwargs: The same by name.
        batch_dim: Where tensors hold the samples.
        last_offset: Whether offsets of bags have one more at the end
            (``include_last_offset``); None if the model has no bags.
    """
    graphs = _graphs_in(model, args, kwargs)
    if graphs is not None:
        places = list(graphs.places())
        return Inputs(graphs.num_graphs, places, graphs.spaces)
    found = all_tensors((args, kwargs))
    packed = _packed_in((*args, *kwargs.values()))
    if packed is not None:
        rows = _sequences_of(packed)
        others = [t for t in found if not any(t is part for part in packed)]
        return Inputs(rows.batch, [(packed.data, rows), *_plain(others, rows.batch, 0)])
    if not found or found[0].ndim <= batch_dim:
        raise RuntimeError(
            f"the model's input has no dimension {batch_dim} to find the samples "
            'in; pass tensors to model(...), or use samples="microbatch"'
        )
    if last_offset is not None:
        pair = [t for t in found[:2] if t.ndim == 1 and not t.is_floating_point()]
        if len(pair) == 2:
            return _bags(found, pair[1], len(pair[1]) - last_offset, batch_dim)
    batch = found[0].shape[batch_dim]
    return Inputs(batch, _plain(found, batch, batch_dim))


def _plain(
    inputs: list[Tensor], batch: int, batch_dim: int
) -> list[tuple[Tensor, Place]]:
    """Tensors that hold samples along a dimension; others (a mask, say) do not."""
    places: list[tuple[Tensor, Place]] = []
    for t in inputs:
        shape = t.shape
        if t.ndim > batch_dim and shape[batch_dim] == batch:
            places.append((t, Axis(batch_dim, batch)))
        elif shape.count(batch) == 1:
            places.append((t, Axis(shape.index(batch), batch)))
    return places


def _bags(inputs: list[Tensor], offsets: Tensor, batch: int, batch_dim: int) -> Inputs:
    """Flat tensors, whose entries belong to the bags that start at the offsets."""
    flat = [t for t in inputs if t.ndim == 1 and len(t) == len(inputs[0])]
    others = [t for t in inputs if not any(t is own for own in flat)]
    rows = torch.arange(len(inputs[0]), device=inputs[0].device)
    ids = torch.searchsorted(offsets[:batch], rows, right=True) - 1
    bags = [(t, Labels(ids.to(t.device), batch)) for t in flat]
    return Inputs(batch, [*_plain(others, batch, batch_dim), *bags])


def _packed_in(values: Value) -> PackedSequence | None:
    """The first packed sequence inside nested inputs."""
    for value in values:
        if isinstance(value, PackedSequence):
            return value
        if isinstance(value, dict | tuple | list):
            found = _packed_in(value.values() if isinstance(value, dict) else value)
            if found is not None:
                return found
    return None


def _sequences_of(packed: PackedSequence) -> Labels:
    """Which sequence every row of its data belongs to, as they came."""
    data, sizes = packed.data, packed.batch_sizes
    # Rows lie time by time, and those of one time by falling length.
    ids = torch.cat([torch.arange(int(n)) for n in sizes]).to(data.device)
    if packed.sorted_indices is not None:
        ids = packed.sorted_indices[ids]
    return Labels(ids.view(-1, *(1,) * (data.ndim - 1)), int(sizes[0]))


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The inputs of a model that takes several graphs at once.

    Attributes:
        inputs: Tensors by their names.
        batch: The graph of every node, shape (N,).
        edges: The nodes of every edge, shape (2, E).
        num_graphs: B.
    """

    inputs: dict[str, Tensor]
    batch: Tensor
    edges: Tensor
    num_graphs: int

    def places(self) -> Iterator[tuple[Tensor, Place]]:
        """Where each input holds its graphs; indices hold none."""
        owners = self.spaces
        for name, t in self.inputs.items():
            if t is self.batch or t is self.edges or not t.ndim:
                continue
            rows = len(t)
            if name.startswith("edge") and rows == self.edges.shape[1]:
                yield t, self._by(self.of_edges, t)
            elif rows in owners:
                yield t, self._by(owners[rows], t)
            elif rows == self.num_graphs:
                yield t, Axis(0, self.num_graphs)

    @property
    def of_edges(self) -> Tensor:
        """The graph of every edge, shape (E,)."""
        return self.batch[self.edges[0]]

    @property
    def spaces(self) -> dict[int, Tensor]:
        """The graph of every row of a tensor with one row a node, or one an edge."""
        return {self.edges.shape[1]: self.of_edges, len(self.batch): self.batch}

    def _by(self, ids: Tensor, t: Tensor) -> Labels:
        return Labels(ids.view(-1, *(1,) * (t.ndim - 1)), self.num_graphs)


def _graphs_in(model: nn.Module, args: Value, kwargs: Value) -> _Graphs | None:
    """The graphs among the inputs of a model, None if it is not called with any."""
    # A quick no for all other models, which every forward pass asks.
    code = getattr(model.forward, "__code__", None)
    named = "edge_index" in kwargs or (
        code is not None and "edge_index" in code.co_varnames
    )
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor) and hasattr(value, "edge_index"):
            fields = value.to_dict() if hasattr(value, "to_dict") else vars(value)
            count = getattr(value, "num_graphs", None)
            return _stacked({**fields, "batch": value.batch}, count)
    if not named:
        return None
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    return _stacked(bound.arguments, bound.arguments.get("batch_size"))


def _stacked(named: dict[str, Value], count: Value) -> _Graphs | None:
    batch, edges = named.get("batch"), named.get("edge_index")
    if not isinstance(batch, Tensor) or not isinstance(edges, Tensor):
        return None
    if batch.ndim != 1 or batch.is_floating_point() or len(edges) != 2:
        return None
    tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
    # Asks the device, as the pooling of these models does.
    num = count if isinstance(count, int) else int(batch.max()) + 1 if len(batch) else 0
    return _Graphs(tensors, batch, edges, num)
