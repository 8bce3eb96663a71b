"""The page of formats names every entry of a state."""

import re

import pytest
import torch
from docs.pages import DOCS
from torch import nn

import dome

PAGE = (DOCS / "reference" / "formats.md").read_text()
NAMED = {name.rpartition(".")[2] for name in re.findall(r"`([\w.<>]+)`", PAGE)}
OPTIONS = [
    {},
    {"layout": "layerwise"},
    {"tracker": "svd"},
    {"direction_rank": 2},
    {"basis_dtype": torch.bfloat16},
]


def state(**options):
    model = nn.Sequential(nn.Linear(80, 70), nn.ReLU(), nn.Linear(70, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=4, **options)
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):
        model(torch.randn(8, 80, generator=rng)).square().mean().backward()
        optimizer.step()
    return grad_filter.state_dict()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_entry_of_a_state_is_on_the_page(options):
    entries = [name for name in state(**options) if name.startswith("blocks.")]
    assert len(entries) > 7
    last = {re.sub(r"_\d+$", "_<i>", name.rpartition(".")[2]) for name in entries}
    assert last <= NAMED


def test_every_entry_on_the_page_is_in_a_state():
    found = {name.rpartition(".")[2] for o in OPTIONS for name in state(**o)}
    said = set(re.findall(r"^\| `blocks\.<block>\.(\w+)`", PAGE, re.MULTILINE))
    assert said
    assert said <= found
