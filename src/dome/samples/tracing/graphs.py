"""Graphs in one batch, as PyTorch Geometric stacks them: a vector names each node's.

Recognised are a model that is called with arguments named ``batch`` and ``edge_index``,
and one object that has both as attributes. A sample is a graph.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.labels import Labels
from dome.samples.tracing.nested import Value
from dome.samples.tracing.origins import Place


@dataclass(frozen=True, slots=True)
class Graphs:
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
        owners = {self.edges.shape[1]: self.of_edges, len(self.batch): self.batch}
        for name, t in self.inputs.items():
            if t is self.batch or t is self.edges or not t.ndim:
                continue
            rows = len(t)
            if name.startswith("edge") and rows == self.edges.shape[1]:
                yield t, self._by(self.of_edges, t)
            elif rows == len(self.batch) or rows in owners:
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


def graphs_in(model: nn.Module, args: Value, kwargs: Value) -> Graphs | None:
    """The graphs among the inputs of a model, None if it is not called with any."""
    named = _named(model, args, kwargs)
    for value in named.values():
        if not isinstance(value, Tensor) and hasattr(value, "edge_index"):
            fields = value.to_dict() if hasattr(value, "to_dict") else vars(value)
            count = getattr(value, "num_graphs", None)
            return _graphs({**fields, "batch": value.batch}, count)
    return _graphs(named, named.get("batch_size"))


def _graphs(named: dict[str, Value], count: Value) -> Graphs | None:
    batch, edges = named.get("batch"), named.get("edge_index")
    if not isinstance(batch, Tensor) or not isinstance(edges, Tensor):
        return None
    if batch.ndim != 1 or batch.is_floating_point() or len(edges) != 2:
        return None
    tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
    # Asks the device, as the pooling of these models does.
    num = count if isinstance(count, int) else int(batch.max()) + 1 if len(batch) else 0
    return Graphs(tensors, batch, edges, num)


def _named(model: nn.Module, args: Value, kwargs: Value) -> dict[str, Value]:
    if not _takes_graphs(model, args, kwargs):
        return {}
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    return dict(bound.arguments)


def _takes_graphs(model: nn.Module, args: Value, kwargs: Value) -> bool:
    """A quick no for all other models, which every forward pass asks."""
    if any(hasattr(value, "edge_index") for value in (*args, *kwargs.values())):
        return True
    code = getattr(model.forward, "__code__", None)
    return "edge_index" in kwargs or (
        code is not None and "edge_index" in code.co_varnames
    )
