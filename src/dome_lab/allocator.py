"""glibc's malloc, told to keep what is freed.

A training step frees what the next one needs again. glibc gives much of it back to the
system, which hands it out page by page, each zeroed first: of a plain step of ResNet-8
(B = 32, one thread) 47 to 53 ms are 36 to 38 without that.
"""

import ctypes
import sys

# Of mallopt(3), and the most that it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_TRIM, MOST_MMAP = (1 << 31) - 1, 1 << 25


def keep_freed_memory() -> bool:
    """Tell the allocator of this process; whether it is one that listens."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    large, top = (M_MMAP_THRESHOLD, MOST_MMAP), (M_TRIM_THRESHOLD, MOST_TRIM)
    return all(bool(mallopt(*option)) for option in (large, top))
