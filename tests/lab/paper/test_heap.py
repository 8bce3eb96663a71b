import platform

import pytest
from page_faults import printed

from dome_lab.paper import workers

PROGRAM = """
import torch, dome
from dome_lab.paper.workers import keep_what_steps_free

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(faults(14, 8 << 20))  # 112 MiB
dome.attach(model, optimizer, rank=2)
print(faults(14, 8 << 20))
keep_what_steps_free()
print(faults(14, 8 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_the_laboratory_keeps_what_steps_free_and_a_filter_leaves_the_heap_alone():
    before, attached, kept = map(int, printed(PROGRAM))
    if before < 1000:
        pytest.skip("an allocator that keeps what is freed")
    assert attached > before / 2
    assert kept < before / 10


@pytest.mark.parametrize("name", workers.TOLD)
def test_a_glibc_that_was_told_what_to_keep_is_left_alone(name, monkeypatch):
    def refused(*_):
        raise AssertionError("it was told something else")

    monkeypatch.setattr("ctypes.CDLL", refused)
    monkeypatch.setenv(name, "65536")
    assert not workers.keep_what_steps_free()


def test_a_library_that_cannot_be_told_is_left_alone(monkeypatch):
    for name in workers.TOLD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not workers.keep_what_steps_free()
