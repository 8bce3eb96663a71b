"""Large matrices lie on large pages, and are ordinary tensors otherwise."""

import copy
import io
import mmap
from pathlib import Path

import pytest
import torch

from dome.numerics.pages import LEAST_BYTES, PAGE_BYTES, large_zeros

SHAPE = (3_001, 1_000)  # 12 MB in float32, and not a whole number of pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, (7, 3), (0, 5)])
def test_they_are_zeros_to_write_to(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = large_zeros(shape, dtype, None)
    assert (made.shape, made.dtype, made.device.type) == (shape, dtype, "cpu")
    assert made.is_contiguous()
    assert not made.any()
    made += 1
    assert bool((made == 1).all())


def test_the_memory_outlives_its_maker() -> None:
    kept = [large_zeros(SHAPE, torch.float32, "cpu").add_(i) for i in range(4)]
    assert [float(t.mean()) for t in kept] == [0.0, 1.0, 2.0, 3.0]


def test_copies_and_files_hold_the_matrix_and_nothing_else() -> None:
    made = large_zeros(SHAPE, torch.float32, "cpu").add_(2)
    assert torch.equal(copy.deepcopy(made), made)
    file = io.BytesIO()
    torch.save(made, file)
    assert len(file.getvalue()) < made.numel() * 4 + 10_000
    file.seek(0)
    assert torch.equal(torch.load(file), made)


def test_only_what_is_large_asks_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise AssertionError("asked for a mapping")

    monkeypatch.setattr(mmap, "mmap", refuse)
    large_zeros((LEAST_BYTES // 4 - 1,), torch.float32, "cpu")
    large_zeros(SHAPE, torch.float32, "meta")
    with pytest.raises(AssertionError, match="mapping"):
        large_zeros((LEAST_BYTES // 4,), torch.float32, "cpu")


def test_without_large_pages_it_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not large_zeros(SHAPE, torch.float32, "cpu").any()


def test_linux_gives_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives out no large pages")
    made = large_zeros((64 * PAGE_BYTES // 4,), torch.float32, "cpu").add_(1)
    assert _large_bytes_around(made.data_ptr()) > 32 * PAGE_BYTES


def _large_bytes_around(address: int) -> int:
    """AnonHugePages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0
