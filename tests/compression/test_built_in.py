import pytest
import torch
from compressors import COMPRESSORS

from dome.compression import Message

EVERY = pytest.mark.parametrize("name", COMPRESSORS)


def vector(dim, rng, dtype=torch.float32):
    return torch.randn(dim, generator=rng, dtype=dtype)


@EVERY
def test_zeros_stay_zeros(name):
    for dim in (1, 100):
        compressor = COMPRESSORS[name](dim)
        for _ in range(2):
            assert not compressor(torch.zeros(dim)).any()
            assert not compressor.decode(compressor.encode(torch.zeros(dim))).any()


@EVERY
def test_the_size_of_a_gradient_does_not_matter(name, rng):
    g = vector(100, rng)
    for size in (1e-30, 1e30):
        one, other = COMPRESSORS[name](100), COMPRESSORS[name](100)
        for _ in range(2):
            pairs = [
                (one(size * g), other(g)),
                (one.decode(one.encode(size * g)), other.decode(other.encode(g))),
            ]
            for scaled, expected in pairs:
                # Rounding changes a level of the quantised ones where it meets a
                # threshold.
                differs = (scaled / size - expected).abs() > 1e-4 * expected.abs().max()
                assert differs.sum() <= 1


@EVERY
def test_a_value_that_is_not_finite_is_named_and_changes_no_state(name, rng):
    compressor = COMPRESSORS[name](100)
    compressor.encode(vector(100, rng))
    before = compressor.state_dict()
    for value in ("nan", "-inf"):
        g = vector(100, rng)
        g[17] = float(value)
        with pytest.raises(
            ValueError, match=rf"entry 17 of the gradient is {value} \("
        ):
            compressor.encode(g)
        if "gaussian" not in name:  # when called, shows what it was given
            with pytest.raises(ValueError, match="entry 17 of the gradient"):
                compressor(g)
    after = compressor.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in after)


@EVERY
def test_what_is_no_vector_of_floats_is_refused(name):
    compressor = COMPRESSORS[name](100)
    for use in (compressor, compressor.encode):
        with pytest.raises(ValueError, match=r"a vector \(D,\), got \(10, 10\)"):
            use(torch.zeros(10, 10))
        with pytest.raises(ValueError, match="got an empty vector"):
            use(torch.zeros(0))
        with pytest.raises(ValueError, match=r"float32 or float64, got torch.int64"):
            use(torch.zeros(100, dtype=torch.int64))


@EVERY
def test_a_flipped_bit_anywhere_is_an_error(name, rng):
    compressor = COMPRESSORS[name](100)
    message = compressor.encode(vector(100, rng))
    places = torch.randperm(message.num_bits, generator=rng)[:200].tolist()
    for place in places:
        payload = message.payload.clone()
        payload[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError, match=r"damaged"):
            compressor.decode(Message(payload))


@EVERY
def test_a_message_cut_off_or_too_long_is_refused(name, rng):
    compressor = COMPRESSORS[name](100)
    payload = compressor.encode(vector(100, rng)).payload
    zero = torch.zeros_like(payload[:1])
    for changed in (
        payload[:-1],
        payload[:-4],
        payload[:40],
        torch.cat([payload, zero]),
    ):
        with pytest.raises(ValueError, match="damaged or cut off"):
            compressor.decode(Message(changed))


@EVERY
def test_messages_of_other_compressors_are_refused(name, rng):
    compressor = COMPRESSORS[name](100)
    for other, make in COMPRESSORS.items():
        if other != name:
            message = make(100).encode(vector(100, rng))
            with pytest.raises(ValueError, match="the message was"):
                compressor.decode(message)


@EVERY
def test_it_says_what_it_is(name):
    shown = repr(COMPRESSORS[name](100)).lower()
    assert shown.startswith(name.split(",")[0] if "feedback" not in name else "error")
    assert name.split(",")[0] in shown
