import pytest
import torch

from dome import linalg, tall
from dome.tall import Tall


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "BLOCK_ROWS", 7)
    monkeypatch.setattr(linalg, "BLOCK_NUMBERS", 0)
    monkeypatch.setattr(tall, "TRIANGULAR_COLUMNS", 4)


def filled(rng, dim, width, dtype=torch.float64):
    matrix = Tall(dim, width, dtype, None)
    matrix.U.copy_(torch.randn(dim, width, generator=rng, dtype=torch.float64))
    return matrix


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 40])
@pytest.mark.parametrize("shape", ["full", "triangular", "diagonal"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("width", [1, 5, 17])
def test_moving_forth_and_back_equals_the_formula(dim, shape, centered, width, rng):
    matrix = filled(rng, dim, width)
    for _ in range(4):
        P = torch.randn(width, width, generator=rng, dtype=torch.float64)
        P = {"full": P, "triangular": P.triu(), "diagonal": P.diagonal().diag()}[shape]
        G = torch.randn(6, dim, generator=rng, dtype=torch.float64)
        M = torch.randn(6, width, generator=rng, dtype=torch.float64)
        M -= M.mean(dim=0)
        expected = matrix.U @ P + (G - G.mean(dim=0)).T @ M
        given = P.diagonal() if shape == "diagonal" else P
        matrix.recombine_(given, G, M, centered=centered)
        torch.testing.assert_close(matrix.U, expected)


def test_without_samples_it_is_a_product(rng):
    matrix = filled(rng, 20, 5)
    P = torch.randn(5, 5, generator=rng, dtype=torch.float64)
    expected = matrix.U @ P
    matrix.recombine_(P)
    torch.testing.assert_close(matrix.U, expected)


def test_sixteen_bits_are_rounded_once(rng):
    matrix = filled(rng, 20, 5, torch.bfloat16)
    P = torch.randn(5, 5, generator=rng, dtype=torch.float64)
    expected = (matrix.U.float() @ P.float()).bfloat16()
    matrix.recombine_(P)
    assert torch.equal(matrix.U, expected)


def test_nothing_but_the_matrix_is_stored(rng):
    matrix = Tall(100, 5, torch.float32, None)
    assert matrix.U.untyped_storage().nbytes() == 100 * 5 * 4


def waiting_pair(rng, dim=40, width=30):
    now = filled(rng, dim, width)
    later = Tall(dim, width, torch.float64, None)
    later.U.copy_(now.U)
    return now, later


def change(rng, dim, width, num_rows):
    P = torch.randn(width, width, generator=rng, dtype=torch.float64).triu()
    G = 3 + torch.randn(num_rows, dim, generator=rng, dtype=torch.float64)
    M = torch.randn(num_rows, width, generator=rng, dtype=torch.float64)
    return P / width, G, M - M.mean(dim=0)


@pytest.mark.parametrize("num_rows", [2, 3])
def test_changes_that_wait_give_the_same_matrix_and_the_same_products(num_rows, rng):
    now, later = waiting_pair(rng)
    num_waited = 0
    for _ in range(7):
        P, G, M = change(rng, 40, 30, num_rows)
        for matrix in (now, later):
            matrix.recombine_(P, G, M, may_wait=matrix is later)
        num_waited += len(later.state_dict()["waiting"]) > 0
        torch.testing.assert_close(later.U, now.U)
        g = torch.randn(40, generator=rng, dtype=torch.float64)
        torch.testing.assert_close(later.coordinates(g), g @ now.U)
        c = torch.randn(30, generator=rng, dtype=torch.float64)
        torch.testing.assert_close(later.subtract(g, c), g - now.U @ c)
        for pairwise in (True, False):
            seen = later.products(G, pairwise=pairwise)
            expected = now.products(G, pairwise=pairwise)
            torch.testing.assert_close(seen.V, expected.V)
            torch.testing.assert_close(seen.m, expected.m)
    assert 0 < num_waited < 7


def test_reading_does_not_settle_and_settling_does_not_change(rng):
    _, later = waiting_pair(rng)
    later.recombine_(*change(rng, 40, 30, 2), may_wait=True)
    before = later.U.clone()
    assert len(later.state_dict()["waiting"]) == 2
    torch.testing.assert_close(later.settled(), before)
    assert len(later.state_dict()["waiting"]) == 0


def test_a_batch_that_is_not_much_smaller_than_the_width_does_not_wait(rng):
    _, later = waiting_pair(rng)
    later.recombine_(*change(rng, 40, 30, 6), may_wait=True)
    assert len(later.state_dict()["waiting"]) == 0


def test_sixteen_bit_storage_never_waits(rng):
    matrix = filled(rng, 40, 30, torch.bfloat16)
    matrix.recombine_(*change(rng, 40, 30, 2), may_wait=True)
    assert len(matrix.state_dict()["waiting"]) == 0
