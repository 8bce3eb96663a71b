import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch, dome

def faults():  # of what a step would use and free again: 16 MB
    for settles in (True, False):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            blocks = [torch.ones(1 << 18) for _ in range(16)]
            del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
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
