import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, torch, dome

libc, size = ctypes.CDLL(None), 3 << 20
libc.malloc.restype = ctypes.c_void_p

def step():  # what a step would use and free again: 48 MB
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(16)]
    for block in blocks:
        libc.memset(block, 1, size)
    for block in blocks:
        libc.free(block)

def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(faults())
dome.attach(model, optimizer, rank=2)
print(faults())
"""
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_with_a_filter_what_steps_free_is_not_fetched_again():
    untold = {name: value for name, value in os.environ.items() if name not in TOLD}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=untold,
    )
    before, after = map(int, done.stdout.split())
    if before < 1000:
        pytest.skip("an allocator that keeps what is freed")
    assert after < before / 10
