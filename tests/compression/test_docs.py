import re
from pathlib import Path

import pytest
import torch

from dome.compression import ErrorFeedback, sum_messages

PAGE = Path(__file__).parents[2] / "docs" / "compression.md"


@pytest.fixture
def first_k():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (source,) = (block for block in blocks if "class FirstK" in block)
    names = {}
    exec(source, names)
    return names["FirstK"]


def test_the_compressor_written_in_the_docs_works(first_k, rng):
    g = torch.randn(10, generator=rng)
    compressor = first_k(3)
    message = compressor.encode(g)
    assert message.num_bits == compressor.num_bits(10)
    assert torch.equal(compressor(g), torch.cat([g[:3], torch.zeros(7)]))
    total = compressor.decode(sum_messages([message, message]))
    assert torch.equal(total, 2 * compressor(g))
    feedback = ErrorFeedback(compressor)
    assert torch.equal(feedback(g) + feedback.error, g)
    with pytest.raises(ValueError, match="other settings"):
        first_k(4).decode(message)
