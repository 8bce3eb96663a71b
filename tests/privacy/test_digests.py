import pytest
import torch

from dome.privacy import sampling
from dome.privacy.sampling import digest, sample_digests

MASK = 2**64 - 1


def literal(values):
    """The digest, one entry after the other, with Python's integers."""
    total = 0
    for value in values.double().flatten():
        bits = int((value + 0.0).view(torch.int64)) * sampling.FIRST & MASK
        signed = bits - 2**64 if bits >> 63 else bits
        total += ((bits ^ (signed >> 32)) & MASK) * sampling.SECOND
    return (total + 2**63) % 2**64 - 2**63


@pytest.fixture
def x(rng):
    return torch.randn(5, 3, 4, generator=rng)


def test_a_digest_is_that_of_the_literal_twin(x):
    assert digest(x) == literal(x)
    assert sample_digests(x, 0) == [literal(row) for row in x]
    assert sample_digests(x, 1) == [literal(row) for row in x.unbind(1)]


def test_parts_make_no_difference(x, monkeypatch):
    expected = digest(x), sample_digests(x, 2)
    for room in (1, 7, 25):
        monkeypatch.setattr(sampling, "AT_ONCE", room)
        assert (digest(x), sample_digests(x, 2)) == expected


def test_shape_order_and_an_exact_cast_make_no_difference(x):
    own = sample_digests(x, 0)
    assert sample_digests(x.transpose(1, 2).flatten(1), 0) == own
    assert sample_digests(x.double(), 0) == own
    counts = torch.arange(256).to(torch.uint8).view(4, 64)
    assert sample_digests(counts.float(), 0) == sample_digests(counts, 0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0, 4.0], [2.0, 2.0]),  # bits of these add up to the same
        ([0.0, 0.0], [0.0, 1e-300]),
        ([1.0, 1.0], [1.0, -1.0]),
        ([0.0], [float("nan")]),
    ],
)
def test_other_numbers_have_another_digest(a, b):
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (a, b))
    assert digest(a) != digest(b)


def test_what_is_the_same_number_is_the_same():
    assert digest(torch.tensor([0.0])) == digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([torch.nan])) == digest(torch.tensor([torch.nan]))
    assert digest(torch.tensor([1 + 2j])) == digest(torch.tensor([[1.0, 2.0]]))
    assert digest(torch.zeros(0, 3)) == 0
    assert sample_digests(torch.zeros(0, 3), 0) == []
