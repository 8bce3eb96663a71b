import sys

import pytest
from page_faults import printed

PROGRAM = """
from dome_lab.allocator import keep_freed_memory

before = faults(20, 8 << 20)  # 160 MB
print(keep_freed_memory(), before, faults(20, 8 << 20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_not_fetched_again():
    listens, before, after = printed(PROGRAM)
    if listens == "False":
        pytest.skip("another allocator")
    assert int(after) < int(before) / 10
