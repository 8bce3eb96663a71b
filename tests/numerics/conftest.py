import pytest

from dome.numerics import cpu


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_NUMBERS", 77)  # seven rows of K = 5 and B = 6
    monkeypatch.setattr(cpu, "PIECE_ROWS", 3)
