import pytest
import torch
from compression_twins import block_sums
from compression_twins import checksum as checksum_by_loop

from dome.compression import (
    HadamardSketch,
    Message,
    PowerSGD,
    RandomK,
    TopK,
    sum_messages,
)
from dome.compression.checksum import (
    checksum,
    count_and_excess,
    num_before_sums,
    num_sums,
    sums_of,
)
from dome.compression.message import HEADER_BYTES

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def flipped(message, place):
    payload = message.payload.clone()
    payload[place // 8] ^= 1 << place % 8
    return Message(payload)


@pytest.mark.parametrize("length", [0, 1, 7, 4096, 4097, 300_000])
def test_bytes_are_checked_by_the_sum_that_the_loop_gives(length, rng):
    data = torch.empty(length, dtype=torch.uint8).random_(generator=rng)
    assert checksum(data).tolist() == [checksum_by_loop(bytes(data.tolist()))]


def test_every_single_bit_changes_the_check_sum(rng):
    data = torch.empty(300, dtype=torch.uint8).random_(generator=rng)
    before = int(checksum(data))
    for place in range(8 * len(data)):
        data[place // 8] ^= 1 << place % 8
        assert int(checksum(data)) != before
        data[place // 8] ^= 1 << place % 8


@pytest.mark.parametrize("length", [0, 1, 512, 1300])
def test_the_sums_of_numbers_are_those_of_the_loop(length, rng):
    z = torch.randn(length, generator=rng, dtype=torch.float64)
    found = sums_of(z)
    torch.testing.assert_close(found, torch.tensor(block_sums(z)).double())
    assert len(found) == num_sums(length)
    assert num_before_sums(length + len(found)) == length


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_never_taken_for_damage(dtype, rng):
    limits = torch.finfo(dtype)
    for _ in range(40):
        num_workers = int(torch.randint(2, 40, (), generator=rng))
        length = int(torch.randint(1, 1500, (), generator=rng))
        z = torch.randn(num_workers, length, generator=rng, dtype=torch.float64)
        # Of any size, the smallest and largest included, and nearly cancelling.
        low, high = torch.tensor([limits.tiny, limits.max], dtype=torch.float64).log2()
        size = low - 20 + (high - low) * torch.rand((), generator=rng)
        z = z * 2.0 ** min(size, high - 10)
        z[1] = -z[0] * (1 + 1e-3)
        parts = [torch.cat([row, sums_of(row)]) for row in z.to(dtype)]
        order = torch.randperm(num_workers, generator=rng).tolist()
        total = parts[order[0]].clone()
        for worker in order[1:]:
            total += parts[worker]
        count, excess = count_and_excess(total).tolist()
        assert count == num_workers
        assert excess <= 1


def test_what_is_not_seen_in_a_sum_is_no_larger_than_rounding_may_be(rng):
    workers, caught = [RandomK(2.0) for _ in range(2)], 0
    messages = [w.encode(torch.randn(2000, generator=rng)) for w in workers]
    total = sum_messages(messages)
    before = total.numbers[:1000].double()
    magnitudes = sum(m.numbers[:1000].double().abs() for m in messages)
    blocks = torch.nn.functional.pad(magnitudes, (0, 24)).view(2, 512).sum(dim=1)
    # Twice |Σ Z − Σ z| ≤ 2 P ε Σ |z|: what is there already, and what is added.
    unseen = 2 * 2 * 2 * torch.finfo(torch.float32).eps * blocks
    for place in torch.randperm(32_000, generator=rng)[:200].tolist():
        damaged = flipped(total, 8 * HEADER_BYTES + place)
        i = place // 32
        try:
            workers[0].decode(damaged)
        except ValueError:
            caught += 1
        else:
            change = (damaged.numbers[i].double() - before[i]).abs()
            assert change <= unseen[i // 512]
    assert caught >= 100  # signs, exponents, half of the mantissas


def test_a_flipped_bit_in_the_count_of_messages_is_no_sum(rng):
    for dtype in DTYPES:
        compressor = RandomK(4.0, value_dtype=dtype)
        message = compressor.encode(torch.randn(40, generator=rng))
        for bit in range(8 * dtype.itemsize):
            with pytest.raises(ValueError, match="its body is not as it was sent"):
                compressor.decode(flipped(message, message.num_bits - 1 - bit))


def test_numbers_changed_otherwise_than_by_adding_are_refused(rng):
    compressor = RandomK(4.0)
    message = compressor.encode(torch.randn(40, generator=rng))
    message.numbers.div_(2)
    with pytest.raises(ValueError, match="may be added on their way, and nothing else"):
        compressor.decode(message)


def test_sums_of_so_many_that_rounding_hides_damage_must_be_finite_only(rng):
    sketch = HadamardSketch(4.0, value_dtype=torch.bfloat16)
    workers = [HadamardSketch(4.0, value_dtype=torch.bfloat16) for _ in range(64)]
    total = sum_messages([w.encode(torch.ones(40)) for w in workers])
    total.numbers[3] += 1000
    assert sketch.decode(total).shape == (40,)
    total.numbers[3] = torch.inf
    with pytest.raises(ValueError, match="damaged, or a sum of messages overflowed"):
        sketch.decode(total)


def test_a_damaged_message_is_not_added_and_its_place_is_named(rng):
    workers = [RandomK(4.0) for _ in range(3)]
    messages = [w.encode(torch.randn(40, generator=rng)) for w in workers]
    messages[1] = flipped(messages[1], 8 * HEADER_BYTES + 5)
    with pytest.raises(ValueError, match="message 1 cannot be added: the message is"):
        sum_messages(messages)


def test_the_sums_of_powersgd_s_phases_are_checked(rng):
    workers = [PowerSGD([(9, 9), (3,)], 2) for _ in range(2)]
    left = sum_messages(
        [w.encode_left(torch.randn(84, generator=rng)) for w in workers]
    )
    with pytest.raises(ValueError, match="damaged, or a sum of messages overflowed"):
        workers[0].encode_right(flipped(left, 8 * HEADER_BYTES + 30))
    right = sum_messages([w.encode_right(left) for w in workers])
    with pytest.raises(ValueError, match="damaged, or a sum of messages overflowed"):
        workers[0].decode_right(flipped(right, 8 * HEADER_BYTES + 30))
    assert workers[0].decode_right(right).shape == (84,)


def test_without_matrices_the_second_sum_is_of_nothing_and_checked_too():
    power = PowerSGD([(5,)])
    left = power.encode_left(torch.arange(5.0))
    right = power.encode_right(left)
    assert torch.equal(power.decode_right(right), torch.arange(5.0))


def test_longer_messages_are_checked_to_the_end(rng):
    compressor = TopK(1.0)
    message = compressor.encode(torch.randn(100_000, generator=rng))
    for place in torch.randperm(message.num_bits, generator=rng)[:10].tolist():
        with pytest.raises(ValueError, match="damaged"):
            compressor.decode(flipped(message, place))
