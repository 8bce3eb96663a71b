import pytest
import torch
from compression_twins import bits_of, integers_in_planes, trits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dome.compression import packing


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda width: st.tuples(
            st.just(width), st.lists(st.integers(0, 2**width - 1), min_size=1)
        )
    )
)
def test_integers_take_the_stated_bytes_and_come_back(case):
    width, values = case
    packed = packing.pack_integers(torch.tensor(values), width)
    assert packed.dtype == torch.uint8
    assert len(packed) == packing.packed_bytes(len(values), width)
    assert len(packed) == (len(values) * width + 7) // 8
    assert integers_in_planes(packed, len(values), width) == values
    assert packing.unpack_integers(packed, len(values), width).tolist() == values


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1))
def test_bits_lie_eight_a_byte_lowest_first(bits):
    packed = packing.pack_bits(torch.tensor(bits, dtype=torch.uint8))
    assert bits_of(packed)[: len(bits)] == bits
    assert packing.unpack_bits(packed, len(bits)).tolist() == bits


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1))
def test_ternary_digits_lie_five_a_byte(trits):
    packed = packing.pack_trits(torch.tensor(trits, dtype=torch.uint8))
    assert len(packed) == (len(trits) + 4) // 5
    assert trits_of(packed, len(trits)) == trits
    assert packing.unpack_trits(packed, len(trits)).tolist() == trits


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 20), st.integers(-9, 9))
def test_chunks_make_no_difference_to_what_comes_back(width, extra):
    count = 2 * packing.CHUNK + extra
    random = torch.Generator().manual_seed(width)
    values = torch.randint(2**width, (count,), generator=random)
    packed = packing.pack_integers(values, width)
    assert len(packed) == packing.packed_bytes(count, width)
    assert torch.equal(packing.unpack_integers(packed, count, width).long(), values)


def test_a_single_possible_value_takes_no_bytes():
    zeros = torch.zeros(5, dtype=torch.int64)
    packed = packing.pack_integers(zeros, packing.width_of(1))
    assert packed.dtype == torch.uint8
    assert len(packed) == 0
    assert torch.equal(packing.unpack_integers(packed, 5, 0).long(), zeros)


@pytest.mark.parametrize(("num", "width"), [(2, 1), (3, 2), (4, 2), (15, 4), (17, 5)])
def test_the_width_tells_all_values_apart(num, width):
    assert packing.width_of(num) == width
