"""What the processes of the laboratory do with memory that a step frees."""

import ctypes
import os
import sys

# Options of mallopt(3), and what they are set to: how much of what is freed is kept,
# and the largest block that is.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT, LARGEST_KEPT = 1 << 27, 1 << 25
# Where a user has told glibc what to keep.
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_what_steps_free() -> bool:
    """Let glibc keep up to 128 MiB of what is freed, for this process.

    By itself it gives nearly all of it back to the system, and the next step has it
    handed out again, page by page, each zeroed: a fifth of a step of ResNet-8, with
    the filter or without. A glibc that was told by its environment what to keep is
    left alone, and other allocators do not mind.

    Returns:
        Whether it listens.
    """
    if sys.platform != "linux" or any(name in os.environ for name in TOLD):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, KEPT)
    return all(bool(mallopt(*option)) for option in options)
