import zlib

import pytest
import torch

from dome.compression import (
    ErrorFeedback,
    HadamardSketch,
    Message,
    PowerSGD,
    RandomK,
    TopK,
    sum_messages,
)
from dome.compression.message import FRONT_BYTES


def message(dim=40, **options):
    return RandomK(4.0, **options).encode(torch.ones(dim))


def flipped(message, place):
    payload = message.payload.clone()
    payload[place // 8] ^= 1 << place % 8
    return Message(payload)


def test_a_message_is_a_tag_a_check_sum_a_step_and_packed_numbers():
    sketch = RandomK(4.0, value_dtype=torch.float64)
    sketch.encode(torch.ones(40))
    found = sketch.encode(torch.ones(40))
    data = bytes(found.payload.tolist())
    assert int.from_bytes(data[:4], "little") == zlib.crc32(repr(sketch).encode())
    assert int.from_bytes(data[4:8], "little") == zlib.crc32(data[8:])
    assert int.from_bytes(data[8:16], "little") == 1  # the step
    assert int.from_bytes(data[16:24], "little") == 40
    assert found.opened()[1:] == (1, 40, torch.float32, torch.float64)
    assert torch.equal(found.numbers.view(torch.uint8), found.body)


def test_the_size_counts_all_that_travels():
    assert message().num_bits == 8 * (FRONT_BYTES + 10 * 4)
    assert FRONT_BYTES == 32


@pytest.mark.parametrize("length", [0, 1, FRONT_BYTES - 1])
def test_less_than_the_front_is_refused(length):
    with pytest.raises(ValueError, match=f"this one has {length}: it was cut off"):
        Message(torch.zeros(length, dtype=torch.uint8))


def test_what_is_not_bytes_is_refused():
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(100,\)"):
        Message(torch.zeros(100))
    with pytest.raises(ValueError, match=r"got torch.uint8 of shape \(10, 10\)"):
        Message(torch.zeros(10, 10, dtype=torch.uint8))


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(ValueError, match="damaged or cut off"):
        TopK(4.0).decode(Message(torch.full((100,), 7, dtype=torch.uint8)))


def test_numbers_added_by_others_make_the_message_of_the_sum():
    single = message()
    total = single.with_numbers(3 * single.numbers)
    assert torch.equal(RandomK(4.0).decode(total), 3 * RandomK(4.0).decode(single))
    assert torch.equal(total.payload, sum_messages([single] * 3).payload)


def test_numbers_are_a_copy():
    single = message()
    before = single.payload.clone()
    single.numbers.zero_()
    assert torch.equal(single.payload, before)


def test_a_message_changed_in_place_is_refused_with_the_way_to_add():
    single = message()
    single.body.view(torch.float32).mul_(2)
    with pytest.raises(ValueError, match="use sum_messages, or numbers and with_num"):
        RandomK(4.0).decode(single)


def test_numbers_of_another_dtype_or_length_do_not_fit():
    for wrong in (message().numbers.double(), message().numbers[1:]):
        with pytest.raises(ValueError, match="pass a sum of message"):
            message().with_numbers(wrong)


def test_a_sum_of_nothing_is_refused_and_that_of_one_is_the_same():
    with pytest.raises(ValueError, match="no message to sum"):
        sum_messages([])
    single = message()
    assert torch.equal(sum_messages([single]).payload, single.payload)


def test_a_damaged_message_is_not_added_and_its_place_is_named():
    messages = [message() for _ in range(3)]
    messages[1] = flipped(messages[1], 8 * FRONT_BYTES + 5)
    with pytest.raises(ValueError, match="message 1 cannot be added: the message is"):
        sum_messages(messages)


def test_the_sums_of_powersgd_s_phases_are_checked(rng):
    workers = [PowerSGD([(9, 9), (3,)], 2) for _ in range(2)]
    left = sum_messages(
        [w.encode_left(torch.randn(84, generator=rng)) for w in workers]
    )
    with pytest.raises(ValueError, match="damaged"):
        workers[0].encode_right(flipped(left, 8 * FRONT_BYTES + 3))
    right = sum_messages([w.encode_right(left) for w in workers])
    with pytest.raises(ValueError, match="damaged"):
        workers[0].decode_right(flipped(right, 8 * FRONT_BYTES + 3))
    assert workers[0].decode_right(right).shape == (84,)


def test_without_matrices_the_second_sum_is_of_nothing():
    power = PowerSGD([(5,)])
    right = power.encode_right(power.encode_left(torch.arange(5.0)))
    assert torch.equal(power.decode_right(right), torch.arange(5.0))


def test_longer_messages_are_checked_to_the_end(rng):
    compressor = TopK(1.0)
    long = compressor.encode(torch.randn(100_000, generator=rng))
    for place in torch.randperm(long.num_bits, generator=rng)[:10].tolist():
        with pytest.raises(ValueError, match="damaged"):
            compressor.decode(flipped(long, place))


def test_a_sum_that_overflowed_is_refused():
    sketch = RandomK(4.0)
    single = sketch.encode(torch.full((40,), 5e37))
    total = sum_messages([single, single])
    with pytest.raises(ValueError, match=r"to be recovered does not fit torch.float32"):
        sketch.decode(total)


def test_what_is_too_large_to_be_recovered_is_refused():
    g, sketch = torch.full((16,), 1e38), HadamardSketch(4.0)
    sent = HadamardSketch(4.0).encode(g)  # what is sent fits float32
    with pytest.raises(ValueError, match=r"to be recovered does not fit torch.float32"):
        sketch.decode(sent)
    with pytest.raises(ValueError, match=r"does not fit torch.float32: scale the grad"):
        sketch(g)
    assert sketch.state_dict()["step"] == 0


def test_other_settings_are_refused_and_those_here_are_named():
    with pytest.raises(ValueError, match=r"was not made by RandomK\(rate=5.0, seed="):
        RandomK(5.0).decode(message())
    with pytest.raises(ValueError, match="other settings"):
        RandomK(4.0, seed=1).decode(message())


def test_a_wrapped_message_is_another_s_and_twice_the_message_itself():
    single = message()
    with pytest.raises(ValueError, match="was not made by RandomK"):
        RandomK(4.0).decode(single.wrapped())
    assert torch.equal(single.wrapped().wrapped().payload, single.payload)


def test_states_of_compressors_that_counted_no_steps_load(rng):
    for compressor in (TopK(4.0), ErrorFeedback(TopK(4.0))):
        compressor(torch.ones(8))
        compressor.load_state_dict({})
        inner = getattr(compressor, "compressor", compressor)
        assert inner.step == 0
