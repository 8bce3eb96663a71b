import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from dome_lab.allocator import keep_freed_memory

listens = sys.argv[1] == "keep" and keep_freed_memory()
libc, size = ctypes.CDLL(None), 8 << 20
libc.malloc.restype = ctypes.c_void_p

def step():  # what a step would use and free again: 160 MB
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(20)]
    for block in blocks:
        libc.memset(block, 1, size)
    for block in blocks:
        libc.free(block)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(listens, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listens, number = done.stdout.split()
    return listens == "True", int(number)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_not_fetched_again():
    listens, kept = faults("keep")
    if not listens:
        pytest.skip("another allocator")
    _, fetched = faults("leave")
    assert kept < fetched / 10
