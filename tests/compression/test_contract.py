import pytest
import torch
from compressors import COMPRESSORS
from docs.examples import example
from safetensors.torch import load, save

from dome.compression import ErrorFeedback, sum_messages
from dome.testing import COMPRESSOR_CHECKS, check_compressor
from dome.testing.compressors import calling_is_the_round_trip

FirstK = example("how-to/compress.md", "FirstK")
KNOWN = COMPRESSORS | {"the one of the docs": lambda dim: FirstK(min(3, dim))}
PAIRS = [
    pytest.param(make, check, id=f"{name}-{check.__name__}")
    for name, make in KNOWN.items()
    for check in COMPRESSOR_CHECKS
    # When called it simulates its sketch, in distribution: what it is for.
    if (name, check) != ("gaussian", calling_is_the_round_trip)
]


@pytest.mark.parametrize(("make", "check"), PAIRS)
def test_a_compressor_keeps_the_contract(make, check):
    check(make)


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_a_state_goes_through_safetensors(make, rng):
    g = torch.randn(100, generator=rng)
    compressor, resumed = make(100), make(100)
    compressor.encode(g)
    resumed.load_state_dict(load(save(compressor.state_dict())))
    assert torch.equal(resumed.encode(g).payload, compressor.encode(g).payload)


def test_the_compressor_of_the_docs_does_what_they_say(rng):
    g = torch.randn(10, generator=rng)
    compressor = FirstK(3)
    message = compressor.encode(g)
    assert message.num_bits == compressor.num_bits(10)
    assert torch.equal(compressor(g), torch.cat([g[:3], torch.zeros(7)]))
    total = compressor.decode(sum_messages([message, message]))
    assert torch.equal(total, 2 * compressor(g))
    feedback = ErrorFeedback(compressor)
    assert torch.equal(feedback(g) + feedback.error, g)
    with pytest.raises(ValueError, match="other settings"):
        FirstK(4).decode(message)


BROKEN = {
    "num_bits": lambda self, dim: 8,
    "recovered": lambda self, parts, dim, step: torch.rand(dim),
    "sent": lambda self, vector, step: [torch.full((self.k,), float(step))],
    "load_state_dict": lambda self, state: None,
}


@pytest.mark.parametrize("member", BROKEN)
def test_a_compressor_with_a_broken_part_fails_the_contract(member):
    broken = type("FirstK", (FirstK,), {member: BROKEN[member]})
    with pytest.raises(AssertionError, match="not so: "):
        check_compressor(lambda dim: broken(min(3, dim)))
