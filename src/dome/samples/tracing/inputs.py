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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Place
from dome.samples.tracing.roles import Named, Roles


@dataclass(frozen=True, slots=True)
class Inputs:
    """The samples that a model is called with.

    Attributes:
        num_samples: B.
        places: Where each tensor holds them, and its name if that is a guess by size.
        fixed: The tensors that hold none.
        spaces: Ids of rows by their number, for rows that nothing was written to.
        others: Names of fixed inputs of another size, if that is a guess, too.
    """

    num_samples: int
    places: list[tuple[Tensor, Place, str]]
    fixed: list[Tensor] = field(default_factory=list)
    spaces: dict[int, Tensor] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def inputs_of(
    model: nn.Module,
    args: Value,
    kwargs: Value,
    roles: Roles,
    batch_dim: int,
    last_offset: bool | None,
) -> Inputs:
    """The samples among the arguments of a model.

    Args:
        model: The model.
        args: What it is called with.
        kwargs: The same by name.
        roles: Which of these hold samples.
        batch_dim: Where tensors hold the samples.
        last_offset: Whether offsets of bags have one more at the end
            (``include_last_offset``); None if the model has no bags.
    """
    graphs = _graphs_in(model, args, kwargs)
    if graphs is not None:
        places = [(t, place, "") for t, place in graphs.places()]
        return Inputs(graphs.num_graphs, places, spaces=graphs.spaces)
    named = roles.named(args, kwargs)
    packed = _packed_in((*args, *kwargs.values()))
    if packed is not None:
        rows = _sequences_of(packed)
        parts = _Known({id(packed.data): rows}, packed)
        return parts.with_others(named, roles, rows.batch, 0)
    if last_offset is not None:
        pair = [t for _, t in named[:2] if t.ndim == 1 and not t.is_floating_point()]
        if len(pair) == 2:
            batch = len(pair[1]) - last_offset
            return _bags(named, pair[1], batch).with_others(
                named, roles, batch, batch_dim
            )
    return _Known().with_others(named, roles, None, batch_dim)


@dataclass(frozen=True, slots=True)
class _Known:
    """Inputs whose roles are told by their kind.

    Attributes:
        places: Where those that hold samples do so, by the ``id`` of the tensor.
        parts: All such inputs, with those that hold none.
    """

    places: dict[int, Place] = field(default_factory=dict)
    parts: Sequence[Tensor | None] = ()

    def with_others(
        self, named: Named, roles: Roles, batch: int | None, batch_dim: int
    ) -> Inputs:
        """These and all further inputs, which have their roles from the table."""
        known = {id(t) for t in self.parts if t is not None}
        others = [pair for pair in named if id(pair[1]) not in known]
        batch, found = roles.assigned(others, batch_dim, batch)
        by_kind = {n: self.places[id(t)] for n, t in named if id(t) in self.places}
        tensors, guessed = dict(named), roles.declared is None
        # One tensor under two names has one role.
        held: dict[int, tuple[str, Place]]
        held = {id(tensors[name]): (name, place) for name, place in found.items()}
        held |= {id(tensors[name]): (name, place) for name, place in by_kind.items()}
        fixed = [(n, t) for n, t in others if id(t) not in held]
        sizes = [n for n, t in fixed if t.ndim > batch_dim and t.shape[batch_dim] > 1]
        sizes = sizes if guessed and batch > 1 else []
        if found:
            roles.check_first(named, next(iter(found)), sizes)
        return Inputs(
            batch,
            [
                (tensors[name], place, name if guessed else "")
                for name, place in held.values()
            ],
            [t for _, t in fixed],
            others=sizes,
        )


def _bags(named: Named, offsets: Tensor, batch: int) -> _Known:
    """Flat tensors, whose entries belong to the bags that start at the offsets."""
    first = named[0][1]
    flat = [t for _, t in named if t.ndim == 1 and len(t) == len(first)]
    rows = torch.arange(len(first), device=first.device)
    ids = torch.searchsorted(offsets[:batch], rows, right=True) - 1
    return _Known({id(t): Labels(ids.to(t.device), batch) for t in flat}, flat)


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
