import pytest
import torch
from samples.loop import sum_loss
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")

SIZES = (3, 5, 4)


class Mail(nn.Module):
    def __init__(self):
        super().__init__()
        self.send, self.keep = nn.Linear(3, 4), nn.Linear(3, 4)
        self.edge, self.head = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x, edge_index, batch, edge_attr):
        source, target = edge_index
        mail = self.send(x).index_select(0, source) * self.edge(edge_attr).sigmoid()
        got = mail.new_zeros(len(x), 4).index_add_(0, target, mail)
        count = torch.bincount(target, minlength=len(x)).clamp(min=1)
        h = (self.keep(x) + got / count[:, None]).tanh()
        num = int(batch.max()) + 1
        index = batch[:, None].expand_as(h)
        return self.head(h.new_zeros(num, 4).scatter_add_(0, index, h))


def graph(num):
    # The first node of each graph gets no mail.
    edges = torch.randint(num, (2, 2 * num))
    edges = torch.where(edges == 0, torch.tensor([[0], [1]]), edges)
    return torch.randn(num, 3), edges, torch.randn(2 * num, 2)


def together(graphs):
    starts = torch.tensor([0, *SIZES]).cumsum(0)
    return {
        "x": torch.cat([x for x, _, _ in graphs]),
        "edge_index": torch.cat(
            [e + s for (_, e, _), s in zip(graphs, starts, strict=False)], 1
        ),
        "batch": torch.arange(3).repeat_interleave(torch.tensor(SIZES)),
        "edge_attr": torch.cat([a for _, _, a in graphs]),
    }


def alone(x, edges, attributes):
    none = torch.zeros(len(x), dtype=torch.long)
    return {"x": x, "edge_index": edges, "batch": none, "edge_attr": attributes}


@pytest.mark.parametrize("as_keywords", [True, False])
def test_a_sample_is_a_graph_where_a_vector_names_the_graph_of_each_node(as_keywords):
    model, graphs = Mail(), [graph(num) for num in SIZES]
    source = PerSample(model, Layout(model))
    given = together(graphs)
    out = model(**given) if as_keywords else model(*given.values())
    sum_loss(out).backward()
    rows = source.take()
    source.detach()
    assert len(rows) == 3
    for row, own in zip(rows, graphs, strict=True):
        model.zero_grad()
        sum_loss(model(**alone(*own))).backward()
        assert_close(row, Layout(model).gather())


def test_graphs_may_come_as_one_object():
    class Object(nn.Module):
        def __init__(self):
            super().__init__()
            self.mail = Mail()

        def forward(self, data):
            return self.mail(data.x, data.edge_index, data.batch, data.edge_attr)

    class Data:
        def __init__(self, **fields):
            vars(self).update(fields)

    model, graphs = Object(), [graph(num) for num in SIZES]
    source = PerSample(model, Layout(model))
    sum_loss(model(Data(**together(graphs)))).backward()
    rows = source.take()
    source.detach()
    model.zero_grad()
    sum_loss(model(Data(**alone(*graphs[1])))).backward()
    assert_close(rows[1], Layout(model).gather())


def test_an_edge_between_two_graphs_is_refused():
    model, given = Mail(), together([graph(num) for num in SIZES])
    given["edge_index"][:, 0] = torch.tensor([0, 4])
    PerSample(model, Layout(model))
    with pytest.raises(
        RuntimeError, match=r"'head.weight' meets samples that were mix"
    ):
        model(**given)


def test_nodes_are_not_samples():
    class Nodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.send, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, edge_index):
            mail = self.send(x)[edge_index[0]]
            return self.head(torch.zeros(len(x), 4).index_add(0, edge_index[1], mail))

    model, (x, edges, _) = Nodes(), graph(5)
    PerSample(model, Layout(model))
    with pytest.raises(
        RuntimeError, match=r"'head.weight' meets samples that were mix"
    ):
        model(x, edges)
