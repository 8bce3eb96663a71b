import pytest
import torch

from dome.numerics import cpu


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def lanes(request, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 7)
    monkeypatch.setattr(cpu, "BLOCK_NUMBERS", 0)
    monkeypatch.setattr(cpu, "PIECE_ROWS", 3)
