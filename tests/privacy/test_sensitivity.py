import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import small_classifier
from privacy.setting import (
    CLIP,
    attach,
    attached,
    flat_grad,
    linear,
    mean_output,
    samples,
    train,
)
from reference import largest_angle

from dome.privacy.releases import clipped_sum_, second_moment_, without_span_

# The sum of a batch in another order: rounding of numbers of the size of B · C.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-12}
DIM, RANK = 20, 4
BASES = ("public", "released", "private")


@st.composite
def batches(draw):
    """Samples of lengths that differ by many orders, a basis, and which one is new."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    G = torch.randn(draw(st.integers(1, 6)), DIM, generator=rng, dtype=dtype)
    lengths = draw(st.lists(st.integers(-6, 37), min_size=len(G), max_size=len(G)))
    G *= 10.0 ** torch.tensor(lengths, dtype=dtype)[:, None]
    U = torch.linalg.qr(torch.randn(DIM, RANK, generator=rng, dtype=dtype)).Q
    if draw(st.booleans()):  # nearly all of a sample lies in the span
        G[-1] = G[-1].norm() * U[:, 0] + 1e-3 * G[-1]
    if draw(st.booleans()):
        G[-1, 0] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    C = 10.0 ** draw(st.integers(-3, 3))
    return G, U, C


def released(G, U, C):
    G = G.clone()
    without_span_(G, U)
    return clipped_sum_(G, C).double()


@settings(max_examples=150, deadline=None)
@given(batches())
def test_one_sample_more_moves_the_filtered_sum_by_at_most_c(batch):
    G, U, C = batch
    change = (released(G, U, C) - released(G[:-1], U, C)).norm()
    assert change <= C * (1 + ROUNDING[G.dtype])


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(0, 1000))
def test_another_sample_in_the_place_of_one_moves_it_by_at_most_2_c(batch, seed):
    G, U, C = batch
    other = G.clone()
    rng = torch.Generator().manual_seed(seed)
    other[-1] = torch.randn(DIM, generator=rng, dtype=G.dtype) * 1e6
    change = (released(G, U, C) - released(other, U, C)).norm()
    assert change <= 2 * C * (1 + ROUNDING[G.dtype])


@settings(max_examples=150, deadline=None)
@given(batches())
def test_one_sample_more_moves_the_second_moment_by_at_most_root_2_c_squared(batch):
    G, U, C = batch
    more = second_moment_(G.clone(), U, C).double()
    less = second_moment_(G[:-1].clone(), U, C).double()
    limit = math.sqrt(2) * C**2 * (1 + ROUNDING[G.dtype])
    assert (more - less).norm() <= limit


def test_the_bounds_are_attained():
    U = torch.eye(DIM, RANK, dtype=torch.float64)
    inside, outside = 1e6 * torch.eye(DIM, dtype=torch.float64)[[0, DIM - 1]]
    # A millionth is left out for the sake of rounding.
    assert released(outside[None], U, 3.0).norm() == pytest.approx(3, rel=2e-6)
    moment = second_moment_(inside[None].clone(), U, 3.0)
    assert moment.norm() == pytest.approx(math.sqrt(2) * 9, rel=2e-6)


def test_centring_the_samples_themselves_would_cost_four_times_as_much(rng):
    def centred(G, U):
        H = G - G.mean(dim=0)
        return H.T @ (H @ U)

    U = torch.eye(DIM, RANK, dtype=torch.float64)
    many = U[:, 0].expand(1000, DIM)  # samples of norm 1, all alike
    change = centred(torch.cat([many, -many[:1]]), U) - centred(many, U)
    assert change.norm() == pytest.approx(4 * 1000 / 1001)


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("number", [1, 2, 9])
def test_what_the_optimizer_gets_moves_by_at_most_c(basis, number, loss_reduction):
    def last_gradient(x, y):
        # Without moving, both worlds have the same history but for the last sample.
        model, optimizer, private = attached(
            basis, expected_batch_size=1.0, loss_reduction=loss_reduction, lr=0.0
        )
        loss = torch.nn.CrossEntropyLoss(reduction=loss_reduction)
        train(model, optimizer, private, (x, y), loss_fn=loss)
        return flat_grad(model)

    x, y = samples(number + 1)
    x[-1] *= 50  # a sample that sticks out, and is answered wrongly
    y[-1] = small_classifier()(x[-1]).argmin()
    change = last_gradient(x, y) - last_gradient(x[:-1], y[:-1])
    assert 0.9 * CLIP < change.norm() <= CLIP * (1 + 1e-12)


def test_what_the_private_basis_learns_is_what_was_noised():
    learned = []

    def basis_after(x):
        model = linear(DIM)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        private = attach(model, optimizer, "private", rank=RANK, expected_batch_size=1)
        learn = private._basis.learn
        private._basis.learn = lambda release: (learned.append(release), learn(release))
        data = (x, torch.zeros(len(x)))
        train(model, optimizer, private, data, loss_fn=mean_output)
        return private._basis.directions()

    rng = torch.Generator().manual_seed(1)
    x = torch.randn(6, DIM, generator=rng, dtype=torch.float64)
    with_it, without = basis_after(x), basis_after(x[:-1])
    more, less = learned
    # In units of C². The noise is the same in both worlds, and not small.
    assert (more.moment - less.moment).norm() <= math.sqrt(2) * (1 + 1e-12)
    assert more.moment_std == pytest.approx(math.sqrt(2) * 2.0)
    assert largest_angle(with_it, without) > 0
