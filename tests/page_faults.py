"""Page faults of a program that uses and frees memory again and again, as steps do."""

import os
import subprocess
import sys

FAULTS = """
import ctypes, resource

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def step(num, size):
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(num)]
    for block in blocks:
        libc.memset(block, 1, size)
    for block in blocks:
        libc.free(block)

def faults(num, size):
    for _ in range(3):
        step(num, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step(num, size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def printed(program):
    """The words that a program prints, which may call ``faults(num, size)``."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS + program],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name not in TOLD},
    )
    return done.stdout.split()
