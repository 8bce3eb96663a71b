import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")

LENGTHS = torch.tensor([2, 5, 1, 4])


class Reader(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.read = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.start, self.head = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, words, topic):
        _, last = self.read(words)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(last.sum(0) * self.start(topic).tanh())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("order", ["as they come", "by length"])
def test_sequences_of_a_packed_input_are_samples(kind, order):
    x, topic, model = torch.randn(4, 5, 3), torch.randn(4, 2), Reader(kind)
    by_length = order == "by length"
    lengths = LENGTHS.sort(descending=True).values if by_length else LENGTHS

    def pack(x, lengths):
        return pack_padded_sequence(x, lengths, True, enforce_sorted=by_length)

    source = PerSample(model, Layout(model))
    model(pack(x, lengths), topic).tanh().sum().backward()
    rows = source.take().clone()
    source.detach()
    for b, row in enumerate(rows):
        model.zero_grad()
        own = slice(b, b + 1)
        model(pack(x[own], lengths[own]), topic[own]).tanh().sum().backward()
        assert_close(row, Layout(model).gather())
