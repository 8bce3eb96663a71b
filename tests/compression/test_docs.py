import inspect
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from compression import test_contract
from compressors import COMPRESSORS

from dome.compression import ErrorFeedback, sum_messages

PAGE = Path(__file__).parents[2] / "docs" / "compression.md"
# The filter's own test, and what only those that are not linear refuse.
OTHERS = {
    "test_it_stands_after_the_filter_and_resumes_with_it",
    "test_messages_of_a_compressor_that_is_not_linear_cannot_be_summed",
    # All of its messages are of step 0.
    "test_messages_of_other_steps_or_sketches_are_not_summed",
}
CONTRACT = [name for name in vars(test_contract) if name.startswith("test_")]


@pytest.fixture
def first_k(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (source,) = (block for block in blocks if "class FirstK" in block)
    file = tmp_path / "first_k.py"
    file.write_text(source)
    spec = spec_from_file_location("first_k", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FirstK


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


@pytest.mark.parametrize("check", sorted(set(CONTRACT) - OTHERS))
def test_one_file_and_one_line_make_a_compressor(check, first_k, rng, monkeypatch):
    monkeypatch.setitem(COMPRESSORS, "firstk", lambda dim: first_k(min(3, dim)))
    test = getattr(test_contract, check)
    arguments = {"name": "firstk", "rng": rng}
    test(**{key: arguments[key] for key in inspect.signature(test).parameters})
