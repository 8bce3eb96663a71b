import pytest
import torch

from dome.compression import HadamardSketch, Message, RandomK, TopK, sum_messages
from dome.compression.message import HEADER_BYTES, Header


def message(dim=40):
    return RandomK(4.0).encode(torch.ones(dim))


def test_a_header_says_what_the_message_is():
    sketch = RandomK(4.0, value_dtype=torch.float64)
    sketch.encode(torch.ones(40))
    header = sketch.encode(torch.ones(40)).header
    assert (header.dim, header.step) == (40, 1)
    assert header.dtype == torch.float32
    assert header.sum_dtype == torch.float64
    assert Header.from_bytes(header.to_bytes()) == header


def test_the_size_counts_header_body_and_sums():
    assert message().num_bits == 8 * (HEADER_BYTES + (10 + 3) * 4)
    assert HEADER_BYTES == 32


def test_numbers_lie_aligned_behind_the_header():
    numbers = RandomK(4.0, value_dtype=torch.float64).encode(torch.ones(40)).numbers
    assert numbers.dtype == torch.float64
    assert numbers.data_ptr() % 8 == 0


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_less_than_a_header_is_refused(length):
    with pytest.raises(ValueError, match=f"this one has {length}: it was cut off"):
        Message(torch.zeros(length, dtype=torch.uint8))


def test_what_is_not_bytes_is_refused():
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(100,\)"):
        Message(torch.zeros(100))
    with pytest.raises(ValueError, match=r"got torch.uint8 of shape \(10, 10\)"):
        Message(torch.zeros(10, 10, dtype=torch.uint8))


def test_bytes_that_are_no_header_are_refused():
    with pytest.raises(ValueError, match=r"no message of a compressor.*0x7 instead of"):
        TopK(4.0).decode(Message(torch.full((100,), 7, dtype=torch.uint8)))
    damaged = message().payload
    damaged[1] = 0xF0
    with pytest.raises(ValueError, match="its header is not as it was written"):
        Message(damaged).header  # noqa: B018 (reading it is the test)


def test_a_body_that_is_cut_within_a_number_is_not_summed():
    cut = Message(message().payload[:-1])
    with pytest.raises(ValueError, match=r"51 bytes holds no torch.float32 numbers"):
        sum_messages([cut])


def test_a_sum_of_nothing_is_refused_and_that_of_one_is_a_copy():
    with pytest.raises(ValueError, match="no message to sum"):
        sum_messages([])
    single = message()
    total = sum_messages([single])
    total.numbers.zero_()
    assert single.numbers.any()


def test_a_sum_that_overflowed_is_refused():
    sketch = RandomK(4.0)
    single = sketch.encode(torch.full((40,), 5e37))
    total = sum_messages([single, single])
    with pytest.raises(ValueError, match="a sum of messages overflowed"):
        sketch.decode(total)


def test_what_is_too_large_to_be_recovered_is_refused():
    g, sketch = torch.full((16,), 1e38), HadamardSketch(4.0)
    message = HadamardSketch(4.0).encode(g)  # what is sent fits float32
    with pytest.raises(ValueError, match=r"to be recovered does not fit torch.float32"):
        sketch.decode(message)
    with pytest.raises(ValueError, match=r"does not fit torch.float32: scale the grad"):
        sketch(g)
    assert sketch.state_dict()["step"] == 0


def test_other_settings_are_refused_and_named():
    with pytest.raises(
        ValueError, match=r"other settings than those here: RandomK\(rate=5.0, seed="
    ):
        RandomK(5.0).decode(message())
    with pytest.raises(ValueError, match="other settings"):
        RandomK(4.0, seed=1).decode(message())


def test_a_wrapped_message_is_another_maker_s_and_twice_the_message_itself():
    single = message()
    with pytest.raises(ValueError, match="was not made by RandomK"):
        RandomK(4.0).decode(single.wrapped())
    assert torch.equal(single.wrapped().wrapped().payload, single.payload)
