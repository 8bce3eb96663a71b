import pytest
import torch
from compression_twins import powersgd
from torch import nn

from dome.compression import PowerSGD, sum_messages
from dome.compression.message import FRONT_BYTES
from dome.parameters import Layout

SHAPES = [(6, 7), (5,), (4, 3, 3, 2), (3, 2), ()]
DIM = 42 + 5 + 72 + 6 + 1
MATRICES = [(0, 6, 7), (47, 4, 18)]  # (3, 2) would not become smaller at rank 2


def compressor(rank=2, **options):
    return PowerSGD(SHAPES, rank, value_dtype=torch.float64, **options)


def vectors(rng, count):
    return [torch.randn(DIM, generator=rng, dtype=torch.float64) for _ in range(count)]


def test_every_matrix_is_a_step_of_the_power_method_from_the_last(rng):
    power = compressor()
    start = None
    for g in vectors(rng, 4):
        received = power(g)
        if start is not None:
            for (begin, n, m), Q in zip(MATRICES, start, strict=True):
                expected, _ = powersgd(g[begin : begin + n * m].view(n, m), Q)
                torch.testing.assert_close(
                    received[begin : begin + n * m].view(n, m), expected
                )
        Q = power.state_dict()["right"]
        start = [Q[:14].view(7, 2), Q[14:].view(18, 2)]
        torch.testing.assert_close(
            Q.view(-1, 2)[:7].norm(dim=0), torch.ones(2).double()
        )


def test_what_is_no_matrix_or_too_small_arrives_whole(rng):
    (g,) = vectors(rng, 1)
    received = compressor()(g)
    assert torch.equal(received[42:47], g[42:47])
    assert torch.equal(received[119:], g[119:])


def test_the_message_holds_both_factors_and_the_rest():
    numbers = 2 * (6 + 7 + 4 + 18) + 5 + 6 + 1
    assert compressor().num_bits(DIM) == 8 * (FRONT_BYTES + 8 * numbers)
    assert PowerSGD(SHAPES).num_bits(DIM) == 8 * (FRONT_BYTES + 4 * numbers)


def test_a_matrix_of_low_rank_arrives_exactly_from_the_second_step(rng):
    A, B = (torch.randn(9, 2, generator=rng, dtype=torch.float64) for _ in range(2))
    g = (A @ B.T).flatten()
    power = PowerSGD([(9, 9)], 2, value_dtype=torch.float64)
    power(g)
    torch.testing.assert_close(power(g), g)


def test_steps_on_one_matrix_approach_the_best_approximation(rng):
    M = torch.randn(20, 15, generator=rng, dtype=torch.float64)
    power = PowerSGD([(20, 15)], 3, value_dtype=torch.float64)
    for _ in range(200):
        received = power(M.flatten()).view(20, 15)
    U, S, V = torch.linalg.svd(M, full_matrices=False)
    torch.testing.assert_close(received, U[:, :3] * S[:3] @ V[:3], rtol=1e-4, atol=1e-4)


def test_one_message_and_two_sums_of_one_worker_are_the_same(rng):
    one, two = compressor(), compressor()
    for g in vectors(rng, 3):
        left = two.encode_left(g)
        right = two.encode_right(left)
        torch.testing.assert_close(two.decode_right(right), one(g))
        extra = 8 * FRONT_BYTES  # of the second message
        assert left.num_bits + right.num_bits == one.num_bits(DIM) + extra


def test_two_sums_over_workers_are_one_step_on_the_summed_vector(rng):
    workers, alone = [compressor() for _ in range(3)], compressor()
    for _ in range(3):
        g = vectors(rng, 3)
        pairs = list(zip(workers, g, strict=True))
        left = sum_messages([w.encode_left(x) for w, x in pairs])
        right = sum_messages([w.encode_right(left) for w in workers])
        totals = [w.decode_right(right) for w in workers]
        assert all(torch.equal(totals[0], t) for t in totals)
        torch.testing.assert_close(totals[0], alone(sum(g)))


def test_a_gradient_of_zeros_and_a_dead_row_do_not_stop_it(rng):
    power = PowerSGD([(9, 9)], 1, value_dtype=torch.float64)
    power(torch.zeros(81, dtype=torch.float64))
    a, b = (torch.randn(9, generator=rng, dtype=torch.float64) for _ in range(2))
    a[0] = 0
    g = torch.outer(a, b).flatten()
    for _ in range(3):
        received = power(g)
    torch.testing.assert_close(received, g)


def test_dependent_columns_give_no_nan(rng):
    a, b = (torch.randn(9, generator=rng) for _ in range(2))
    g = torch.outer(a, b).flatten()
    power = PowerSGD([(9, 9)], 3)
    for _ in range(5):
        received = power(g)
    torch.testing.assert_close(received, g, rtol=1e-4, atol=1e-5)


def test_shapes_come_from_a_layout_too(rng):
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    by_layout, by_hand = (
        PowerSGD(shapes, 1)
        for shapes in (Layout(model), [p.shape for p in model.parameters()])
    )
    g = torch.randn(93, generator=rng)
    assert torch.equal(by_layout(g), by_hand(g))
    assert torch.equal(
        by_hand.decode(by_layout.encode(g)), by_hand(by_layout(g) * 0 + g)
    )


def test_phases_in_the_wrong_order_are_refused(rng):
    power, (g, h) = compressor(), vectors(rng, 2)
    left = compressor().encode_left(g)
    with pytest.raises(RuntimeError, match="call encode_left first"):
        power.encode_right(left)
    left = power.encode_left(g)
    with pytest.raises(RuntimeError, match="comes after encode_right"):
        power.decode_right(left)
    right = power.encode_right(left)
    with pytest.raises(ValueError, match=r"was not made by PowerSGD\(.*, right"):
        power.decode_right(left)
    power.decode_right(right)
    power.encode_left(h)
    with pytest.raises(ValueError, match="is of step 0, this is step 1"):
        power.encode_right(left)


def test_gradients_and_messages_of_other_shapes_are_refused(rng):
    (g,) = vectors(rng, 1)
    with pytest.raises(ValueError, match="126 entries together, this gradient has 125"):
        compressor()(g[1:])
    other = PowerSGD([(126,)], value_dtype=torch.float64)
    with pytest.raises(ValueError, match="other settings"):
        compressor().decode(other.encode(g))
    with pytest.raises(ValueError, match="126 entries together, this gradient has 127"):
        compressor().num_bits(127)


def test_a_state_of_other_shapes_is_refused_before_anything_is_loaded(rng):
    power, other = compressor(), PowerSGD([(9, 9)], 2)
    other(torch.ones(81))
    with pytest.raises(ValueError, match=r"saved Q has 18 numbers, .* rank 2 has 50"):
        power.load_state_dict(other.state_dict())
    assert power.state_dict()["step"] == 0


def test_a_rank_below_one_and_no_parameters_are_refused():
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        PowerSGD([(3, 3)], 0)
    with pytest.raises(ValueError, match="shapes have no entries"):
        PowerSGD([(0, 3)])


def test_a_state_saved_between_the_phases_starts_the_next_step(rng):
    power, (g, h) = compressor(), vectors(rng, 2)
    power(g)
    power.encode_left(g)
    resumed = compressor()
    resumed.load_state_dict(power.state_dict())
    torch.testing.assert_close(resumed(h), power(h))
