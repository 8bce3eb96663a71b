import pytest

from dome.numerics import linalg


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "CPU_NUMBERS", 77)  # seven rows of K = 5 and B = 6
