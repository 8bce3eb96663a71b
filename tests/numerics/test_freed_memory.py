import platform

import pytest
from page_faults import printed

from dome.numerics import cpu

PROGRAM = """
import torch, dome

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(faults(14, 8 << 20))  # 112 MiB
dome.attach(model, optimizer, rank=2)
print(faults(14, 8 << 20))
large = torch.nn.Linear(34, 1_000_000)
optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
dome.attach(large, optimizer, rank=2, direction_rank=1)
print(faults(14, 8 << 20), faults(14, 1 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_with_a_filter_what_steps_free_is_not_fetched_again():
    before, after, of_large, small_of_large = map(int, printed(PROGRAM))
    if before < 1000:
        pytest.skip("an allocator that keeps what is freed")
    assert after < before / 10
    # Large blocks of a large model are given back: they would leave holes.
    assert of_large > 1000
    assert small_of_large < before / 100


@pytest.mark.parametrize("name", cpu.TOLD)
def test_a_glibc_that_was_told_what_to_keep_is_left_alone(name, monkeypatch):
    def refused(*_):
        raise AssertionError("it was told something else")

    monkeypatch.setattr("ctypes.CDLL", refused)
    monkeypatch.setenv(name, "65536")
    assert not cpu.keep_what_steps_free()


def test_a_library_that_cannot_be_told_is_left_alone(monkeypatch):
    for name in cpu.TOLD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not cpu.keep_what_steps_free()
