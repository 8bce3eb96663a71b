import platform

import pytest
from page_faults import printed

PROGRAM = """
import torch, dome

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(faults(16, 3 << 20))  # 48 MB
dome.attach(model, optimizer, rank=2)
print(faults(16, 3 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_with_a_filter_what_steps_free_is_not_fetched_again():
    before, after = map(int, printed(PROGRAM))
    if before < 1000:
        pytest.skip("an allocator that keeps what is freed")
    assert after < before / 10
