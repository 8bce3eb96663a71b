import re

import pytest
import torch
from compressors import COMPRESSORS

from dome.compression import Message

EVERY = pytest.mark.parametrize("name", COMPRESSORS)
NUM_DRAWS = 40
NAMED = re.compile(
    r"entry \d+ of the gradient is (nan|-?inf) \(\d+ of \d+ are not finite\)"
    r"|a number to be (sent|recovered) does not fit torch\.float"
)


def hostile(rng):
    """A vector of any length and scale, at times with entries that are not finite."""
    dim = [1, 2, 3, 16, 17, 100, 700][int(torch.randint(7, (), generator=rng))]
    dtype = [torch.float32, torch.float64][int(torch.randint(2, (), generator=rng))]
    limits = torch.finfo(dtype)
    draw = torch.rand(3, generator=rng, dtype=torch.float64)
    # From the smallest subnormal to the largest number, evenly in the exponent.
    exponents = torch.tensor(
        [limits.tiny * limits.eps, limits.max], dtype=torch.float64
    )
    low, high = exponents.log2()
    each = torch.rand(dim, generator=rng, dtype=torch.float64)
    exponent = low + (high - low) * (each if draw[0] < 0.3 else draw[1])
    values = torch.randn(dim, generator=rng, dtype=torch.float64).clamp(-1, 1)
    g = (values * 2.0 ** (exponent / 2) * 2.0 ** (exponent / 2)).to(dtype)
    if draw[2] < 0.2:
        place = int(torch.randint(dim, (), generator=rng))
        g[place] = [torch.nan, torch.inf, -torch.inf][place % 3]
    if draw[2] > 0.9:
        g[torch.rand(dim, generator=rng) < 0.5] = 0.0
    return g


def same_state(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) for k in one
    )


def close(a, b):
    """Equal up to the rounding of float32, whatever their size."""
    a, b = a.double(), b.double()
    # Below, float32 has no digits left.
    size = max(float(a.abs().max()), float(b.abs().max()), 1e-38)
    return bool(((a / size - b / size).abs() <= 1e-5).all())


def refused(use, g):
    """What ``use`` gives for a vector, and the message if it is refused instead."""
    try:
        return use(g), None
    except ValueError as error:
        return None, str(error)


@EVERY
def test_any_vector_is_sent_whole_or_refused_by_name(name, rng):
    num_sent = 0
    for _ in range(NUM_DRAWS):
        g = hostile(rng)
        compressor, twin = COMPRESSORS[name](len(g)), COMPRESSORS[name](len(g))
        before = compressor.state_dict()
        message, problem = refused(compressor.encode, g)
        if message is None:
            assert same_state(compressor.state_dict(), before)
            recovered = None
        else:
            assert g.isfinite().all()
            assert message.num_bits == compressor.num_bits(len(g))
            recovered, problem = refused(compressor.decode, message)
        called, its_problem = refused(twin, g)
        if "gaussian" in name:  # simulated when called, and passes on what is given
            called, its_problem = recovered, problem
        assert (problem is None) == (its_problem is None)
        if recovered is None:
            assert NAMED.match(problem)
            assert NAMED.match(its_problem)
            continue
        num_sent += 1
        assert recovered.dtype == g.dtype
        assert recovered.isfinite().all()
        assert torch.equal(recovered, called)
        KEEPS.get(name.split(",")[0], lambda g, c: None)(g, recovered)
        if "error feedback" in name:
            assert close(recovered.double() + compressor.error.double(), g)
    assert num_sent >= NUM_DRAWS // 3


def no_longer(g, c):
    """‖C(g) − g‖ ≤ ‖g‖, as of a contraction; in units in which squares are finite."""
    size = max(float(g.double().abs().max()), 1e-38)
    g, c = g.double() / size, c.double() / size
    assert (c - g).norm() <= g.norm() + 1e-5


def entries(scale):
    """Entries that arrived are those that were there, times a scale."""

    def check(g, c):
        sent = c != 0
        assert close(c[sent], scale(len(g)) * g[sent].double()) if sent.any() else True

    return check


def within_a_level(num_levels):
    """No entry of a bucket of 16 is off by more than one level of its scale."""

    def check(g, c):
        for x, y in zip(g.double().split(16), c.double().split(16), strict=True):
            size = max(float(x.abs().max()), 1e-37)
            level = (x / size).norm() / num_levels
            assert ((x / size - y / size).abs() <= level + 1e-5).all()

    return check


KEEPS = {
    "topk": entries(lambda dim: 1.0),
    "signsgd": no_longer,
    "powersgd": no_longer,
    "qsgd": within_a_level(3),
    "terngrad": within_a_level(1),
}


@EVERY
def test_a_message_of_random_bytes_is_refused(name, rng):
    compressor = COMPRESSORS[name](100)
    payload = compressor.encode(torch.randn(100, generator=rng)).payload
    for _ in range(10):
        start = int(torch.randint(len(payload), (), generator=rng))
        noise = payload.clone()
        noise[start:].random_(generator=rng)
        with pytest.raises(ValueError, match="damaged"):
            compressor.decode(Message(noise))
