"""Layers of PyTorch Geometric on graphs of different sizes in one batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as geometric
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from model_zoo.case import Case, Value

SIZES = (3, 5, 4)


def graphs() -> list[Data]:
    """Random graphs; no edge leads to the first node of each."""
    found = []
    for seed, num in enumerate(SIZES):
        rng = torch.Generator().manual_seed(seed)
        edges = torch.randint(num, (2, 3 * num), generator=rng)
        edges = edges[:, (edges[0] != edges[1]) & (edges[1] != 0)]
        features = torch.randn(edges.shape[1], 3, generator=rng).double()
        nodes = torch.randn(num, 5, generator=rng).double()
        found.append(Data(x=nodes, edge_index=edges, edge_attr=features))
    return found


class Net(nn.Module):
    """Two layers, pooled to one prediction a graph."""

    def __init__(
        self, first: nn.Module, second: nn.Module, pool: Value, width: int
    ) -> None:
        super().__init__()
        self.first, self.second, self.pool = first, second, pool
        self.head = nn.Linear(width, 3)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """One row of predictions a graph."""
        edges = () if edge_attr is None else (edge_attr,)
        h = self.first(x, edge_index, *edges).relu()
        h = self.second(h, edge_index, *edges).relu()
        return self.head(self.pool(h, batch))


class Normed(nn.Module):
    """A layer and a normalisation that is told the graphs."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = geometric.GCNConv(5, 8), norm
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """One row of predictions a graph."""
        h = self.norm(self.layer(x, edge_index), batch)
        return self.head(geometric.global_mean_pool(h, batch))


class Pooled(nn.Module):
    """A layer that keeps the best nodes of each graph."""

    def __init__(self, pooling: nn.Module) -> None:
        super().__init__()
        self.first, self.second = geometric.GCNConv(5, 8), geometric.GCNConv(8, 8)
        self.pooling, self.head = pooling, nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """One row of predictions a graph."""
        h = self.first(x, edge_index).relu()
        h, edges, _, kept, *_ = self.pooling(h, edge_index, None, batch)
        h = geometric.global_mean_pool(
            self.second(h, edges), kept, int(batch.max()) + 1
        )
        return self.head(h)


class Whole(nn.Module):
    """Takes the batch as one object."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(geometric.GCNConv(5, 8), geometric.GCNConv(8, 8), mean, 8)

    def forward(self, data: Data) -> Tensor:
        """One row of predictions a graph."""
        return self.net(data.x, data.edge_index, data.batch)


def mean(h: Tensor, batch: Tensor) -> Tensor:
    """The mean over the nodes of a graph."""
    return geometric.global_mean_pool(h, batch)


def case(model: nn.Module, edges: bool = False) -> Case:
    """All graphs at once, and each on its own."""
    data = graphs()

    def inputs(some: list[Data]) -> dict[str, Any]:
        b = Batch.from_data_list(some)
        given = {"x": b.x, "edge_index": b.edge_index, "batch": b.batch}
        return given | ({"edge_attr": b.edge_attr} if edges else {})

    return Case(model, inputs(data), split=lambda _, b: inputs([data[b]]))


def layers(
    make: Callable[..., nn.Module],
    pool: Value = mean,
    edges: bool = False,
    width: int = 8,
) -> Callable[[], Case]:
    """A case of two layers of one kind."""
    return lambda: case(Net(make(5, 8), make(8, 8), pool, width), edges)


def perceptron(n: int, m: int) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(n, m), nn.ReLU(), nn.Linear(m, m))


def whole() -> Case:
    """The batch as one object."""
    data = graphs()
    return Case(
        Whole(),
        {"data": Batch.from_data_list(data)},
        split=lambda _, b: {"data": Batch.from_data_list([data[b]])},
    )


def one_graph() -> Case:
    """A single graph whose nodes would be the samples."""

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = geometric.GCNConv(5, 8)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.first(x, edge_index)

    data = graphs()[1]
    inputs = {"x": data.x, "edge_index": data.edge_index}
    return Case(Nodes(), inputs, split=lambda given, _: given, batch=SIZES[1])


g = geometric
GRAPHS: dict[str, Callable[[], Case]] = {
    "GCN": layers(g.GCNConv),
    "GraphSAGE": layers(g.SAGEConv),
    "GraphSAGE, maxima": layers(
        lambda n, m: g.SAGEConv(n, m, aggr="max"), g.global_max_pool
    ),
    "GAT": layers(g.GATConv, g.global_add_pool),
    "GAT, two heads": layers(lambda n, m: g.GATConv(n, m // 2, heads=2)),
    "GAT, features of edges": layers(
        lambda n, m: g.GATConv(n, m, edge_dim=3), edges=True
    ),
    "GATv2": layers(g.GATv2Conv),
    "GIN": layers(lambda n, m: g.GINConv(perceptron(n, m), train_eps=True)),
    "GINE": layers(lambda n, m: g.GINEConv(perceptron(n, m), edge_dim=3), edges=True),
    "GraphConv": layers(g.GraphConv),
    "graph transformer": layers(g.TransformerConv),
    "TAGCN": layers(g.TAGConv),
    "ChebNet": layers(lambda n, m: g.ChebConv(n, m, K=2)),
    "SGC": layers(g.SGConv),
    "residual gated": layers(g.ResGatedGraphConv),
    "ARMA": layers(g.ARMAConv),
    "LEConv": layers(g.LEConv),
    "FiLM": layers(g.FiLMConv),
    "GENConv": layers(lambda n, m: g.GENConv(n, m, norm="layer")),
    "Cluster-GCN": layers(g.ClusterGCNConv),
    "SuperGAT": layers(g.SuperGATConv),
    "EGConv": layers(lambda n, m: g.EGConv(n, m, num_heads=2, num_bases=2)),
    "NNConv": layers(lambda n, m: g.NNConv(n, m, nn.Linear(3, n * m)), edges=True),
    "GraphNorm": lambda: case(Normed(g.GraphNorm(8))),
    "InstanceNorm": lambda: case(Normed(g.InstanceNorm(8, affine=True))),
    "LayerNorm": lambda: case(Normed(g.LayerNorm(8))),
    "PairNorm": lambda: case(Normed(g.PairNorm())),
    "top-k pooling": lambda: case(Pooled(g.TopKPooling(8))),
    "SAG pooling": lambda: case(Pooled(g.SAGPooling(8))),
    "attention pooling": layers(
        g.GCNConv, pool=g.AttentionalAggregation(nn.Linear(8, 1)).double()
    ),
    "Set2Set": layers(g.GCNConv, pool=g.Set2Set(8, 2).double(), width=16),
    "a batch as one object": whole,
    "one graph, nodes as samples": one_graph,
}
