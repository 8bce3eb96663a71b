import pytest
import torch

from dome import linalg, tall
from dome.tall import Tall


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "BLOCK_ROWS", 7)
    monkeypatch.setattr(tall, "TRIANGULAR_COLUMNS", 4)


def filled(rng, dim, width, dtype=torch.float64):
    matrix = Tall(dim, width, dtype, None)
    matrix.U.copy_(torch.randn(dim, width, generator=rng, dtype=torch.float64))
    return matrix


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 40])
@pytest.mark.parametrize("shape", ["full", "triangular", "diagonal"])
@pytest.mark.parametrize("centered", [True, False])
def test_moving_forth_and_back_equals_the_formula(dim, shape, centered, rng):
    matrix = filled(rng, dim, 5)
    for _ in range(4):
        P = torch.randn(5, 5, generator=rng, dtype=torch.float64)
        P = {"full": P, "triangular": P.triu(), "diagonal": P.diagonal().diag()}[shape]
        G = torch.randn(6, dim, generator=rng, dtype=torch.float64)
        M = torch.randn(6, 5, generator=rng, dtype=torch.float64)
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


def test_the_storage_is_one_block_more(rng):
    matrix = Tall(100, 5, torch.float32, None)
    assert matrix.U.untyped_storage().nbytes() == (100 + 7) * 5 * 4
