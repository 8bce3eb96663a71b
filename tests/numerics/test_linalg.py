import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dome.numerics import linalg, vectors
from dome.numerics.linalg import (
    coefficients,
    gram,
    largest_angle,
    outside,
    products,
    recombine_,
    squared_norms,
    subtract_combination,
)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "BLOCK_ROWS", 7)
    monkeypatch.setattr(linalg, "BLOCK_NUMBERS", 0)
    monkeypatch.setattr(vectors, "PIECE_ROWS", 3)


def orthonormal(rng, dim, rank):
    Q, _ = torch.linalg.qr(torch.randn(dim, rank, generator=rng, dtype=torch.float64))
    return Q


def test_the_largest_angle_of_a_known_rotation_is_found():
    V = torch.eye(4, dtype=torch.float64)[:, :2]
    for angle in (1e-9, 0.3, math.pi / 2):
        W = V.clone()
        W[1, 1], W[2, 1] = math.cos(angle), math.sin(angle)
        assert float(largest_angle(V, W)) == pytest.approx(angle)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 9])
def test_products_of_pieces_add_up(dim, rng):
    A = torch.randn(4, dim, generator=rng, dtype=torch.float64)
    C = torch.randn(dim, 5, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(linalg.sum_of_products(A, C), A @ C)


def test_blockwise_products_equal_whole_ones(rng):
    U = orthonormal(rng, 40, 5)
    G = torch.randn(6, 40, generator=rng, dtype=torch.float64) + 2
    H = G - G.mean(dim=0)
    torch.testing.assert_close(gram(U), U.T @ U)
    torch.testing.assert_close(coefficients(U, G), G @ U)
    for pairwise in (True, False):
        seen = products(U, G, pairwise=pairwise).scaled(3.0)
        torch.testing.assert_close(seen.V, 3 * H @ U)
        torch.testing.assert_close(seen.m, 3 * U.T @ G.mean(dim=0))
        torch.testing.assert_close(seen.Hmu, 9 * H @ G.mean(dim=0))
        torch.testing.assert_close(seen.mu2, 9 * G.mean(dim=0).square().sum())
        torch.testing.assert_close(seen.energy, 9 * H.square().sum())
        torch.testing.assert_close(seen.sample_norms_squared, 9 * G.square().sum(dim=1))
    torch.testing.assert_close(products(U, G, pairwise=True).scaled(3.0).K, 9 * H @ H.T)


@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 7, 8, 40])
def test_projections_of_one_gradient_equal_the_formula(dim, storage, rng):
    U = torch.randn(dim, 5, generator=rng, dtype=torch.float64).to(storage)
    dtype = linalg.compute_dtype(storage)
    g = torch.randn(dim, generator=rng, dtype=torch.float64).to(dtype)
    c = torch.randn(5, generator=rng, dtype=torch.float64)
    exact = g.double() - U.double() @ c
    subtracted = linalg.subtract_combination(g, U, c)
    torch.testing.assert_close(subtracted, exact.to(dtype))
    coordinates = linalg.coefficients(U, g[None])[0]
    # Sums of products that were rounded to the precision they are formed in.
    tight = {"rtol": 0.0, "atol": 100 * torch.finfo(dtype).eps}
    torch.testing.assert_close(coordinates, g.double() @ U.double(), **tight)


def test_recombination_in_place_equals_the_formula(rng):
    U = orthonormal(rng, 40, 5)
    P = torch.randn(5, 5, generator=rng, dtype=torch.float64)
    expected = U @ P
    recombine_(U, P)
    torch.testing.assert_close(U, expected)


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("pairwise", [True, False])
@pytest.mark.parametrize("num_samples", [6, 70], ids=["few", "split"])
def test_products_keep_their_digits_whatever_the_mean(mean, pairwise, num_samples, rng):
    U = orthonormal(rng, 90, 5)
    G = torch.randn(num_samples, 90, generator=rng, dtype=torch.float64) + mean
    H = G - G.mean(dim=0)
    seen = products(U, G, pairwise=pairwise)
    # A mean of 1e6 leaves ten digits of what the samples' own rounding keeps.
    close = {"rtol": 1e-7, "atol": 1e-7 * max(mean, 1.0) ** 0.5}
    torch.testing.assert_close(seen.V, H @ U, **close)
    expected = H @ H.T if pairwise else H.square().sum(dim=1)
    torch.testing.assert_close(seen.K, expected, **close)


def test_what_samples_have_outside_a_basis_keeps_its_digits_where_little_is(rng):
    U = orthonormal(rng, 40, 5).float()
    inside = 1000 * torch.randn(6, 5, generator=rng) @ U.T
    G = inside + 0.01 * torch.randn(6, 40, generator=rng)
    exact, basis = G.double() - G.double().mean(dim=0), U.double()
    V = products(U, G, pairwise=False).V
    correction, inner = outside(U, G, V, 1.0)
    total = V + correction
    rest = exact - total @ basis.T
    # Float32 rounds samples of length 2,000 to 1e-4, a fiftieth of what is outside.
    torch.testing.assert_close(
        inner - correction @ correction.T, rest @ rest.T, rtol=0.1, atol=1e-4
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 9))
def test_row_blocks_cover_every_row_once(num_rows, width):
    blocks = list(linalg.row_blocks(num_rows, width))
    assert [i for rows in blocks for i in range(num_rows)[rows]] == list(
        range(num_rows)
    )
    assert all(rows.stop - rows.start <= 7 for rows in blocks)


def test_blocks_of_short_rows_are_longer(monkeypatch):
    monkeypatch.setattr(linalg, "BLOCK_NUMBERS", 100)
    assert [linalg.block_rows(width) for width in (0, 1, 5, 10, 20, 1000)] == [
        *(100, 100, 20, 10, 7, 7),
    ]


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
def test_squared_norms_are_those_of_the_rows(dim, rng):
    G = torch.randn(4, dim, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(squared_norms(G), G.square().sum(dim=1))


@pytest.mark.parametrize("dim", [1, 2, 3, 10, 25])
@pytest.mark.parametrize("rank", [1, 4])
def test_one_gradient_is_projected_as_by_the_formula(dim, rank, rng):
    U = torch.randn(dim, rank, generator=rng, dtype=torch.float64)
    g = torch.randn(dim, generator=rng, dtype=torch.float64)
    c = coefficients(U, g[None])[0]
    torch.testing.assert_close(c, U.T @ g)
    before = g.clone()
    torch.testing.assert_close(subtract_combination(g, U, c), g - U @ (U.T @ g))
    assert torch.equal(g, before)
