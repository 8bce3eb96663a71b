import inspect
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from compression import test_contract
from compressors import COMPRESSORS

from dome.compression import ErrorFeedback, sum_messages

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "compress.md"
CONTRACT = sorted(name for name in vars(test_contract) if name.startswith("test_"))


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


def run(check, make, rng, monkeypatch):
    monkeypatch.setitem(COMPRESSORS, "firstk", make)
    test = getattr(test_contract, check)
    arguments = {"name": "firstk", "rng": rng}
    test(**{key: arguments[key] for key in inspect.signature(test).parameters})


@pytest.mark.parametrize("check", CONTRACT)
def test_one_file_and_one_line_make_a_compressor(check, first_k, rng, monkeypatch):
    run(check, lambda dim: first_k(min(3, dim)), rng, monkeypatch)


BROKEN = {
    "num_bits": lambda self, dim: 8,
    "recovered": lambda self, parts, dim, step: torch.rand(dim),
    "sent": lambda self, vector, step: [torch.full((self.k,), float(step))],
    "load_state_dict": lambda self, state: None,
}


@pytest.mark.parametrize("member", BROKEN)
def test_a_compressor_with_a_broken_part_fails_the_contract(
    member, first_k, rng, monkeypatch
):
    broken = type("FirstK", (first_k,), {member: BROKEN[member]})
    failed = 0
    for check in CONTRACT:
        try:
            run(check, lambda dim: broken(min(3, dim)), rng, monkeypatch)
        except (AssertionError, RuntimeError, pytest.fail.Exception):
            failed += 1
    assert failed
