import pytest
import torch

from dome.trackers import linalg
from dome.trackers.linalg import gram_schmidt, inverse_cholesky


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "CPU_NUMBERS", 77)  # seven rows of K = 5 and B = 6


def random(rng, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dim", [0, 1, 3, 8, 25])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 5), (4, 5), (6, 2)])
def test_products_over_the_rows_are_those_of_whole_matrices(
    dim, num_rows, num_columns, rng
):
    A, C = random(rng, num_rows, dim), random(rng, dim, num_columns)
    torch.testing.assert_close(linalg.product(A, C), A @ C)
    torch.testing.assert_close(linalg.gram(C), C.T @ C)
    torch.testing.assert_close(linalg.squared_norms(A), A.square().sum(dim=1))


def test_sixteen_bits_are_multiplied_in_thirty_two(rng):
    A = random(rng, 4, 40, dtype=torch.bfloat16)
    C = random(rng, 40, 5, dtype=torch.bfloat16)
    exact = A.double() @ C.double()
    # Products of float32: 40 roundings of 6e-8 each.
    torch.testing.assert_close(linalg.product(A, C), exact, rtol=1e-5, atol=1e-5)


def test_products_may_be_formed_in_another_precision(rng):
    A = random(rng, 4, 40)
    product = linalg.product(A, A.T, torch.float32)
    assert not torch.equal(product, linalg.product(A, A.T))
    torch.testing.assert_close(product, A @ A.T, rtol=1e-5, atol=1e-5)


def test_long_sums_of_float32_keep_their_digits(monkeypatch):
    # A hundred thousand blocks of one: added up in float32, the sum ends at 2^24.
    monkeypatch.setattr(linalg, "CPU_NUMBERS", 1 << 14)
    ones = torch.ones(1, (1 << 24) + (1 << 20))
    assert linalg.product(ones, ones.T).item() == ones.numel()
    assert linalg.squared_norms(ones).item() == pytest.approx(ones.numel(), rel=1e-7)


def test_blocks_take_the_same_room_whatever_their_width(monkeypatch):
    sizes = [linalg.block_rows(width) for width in (0, 1, 5, 10, 77, 1000)]
    assert sizes == [77, 77, 15, 7, 1, 1]
    device = torch.device("meta")
    assert linalg.block_rows(100, device) == linalg.DEVICE_NUMBERS // 100


def test_both_factors_of_a_full_rank_gram_matrix_are_its_cholesky_factor(rng):
    A = 3 * torch.randn(20, 4, generator=rng, dtype=torch.float64)
    C = A.T @ A
    for inverse, own in (inverse_cholesky(C), gram_schmidt(C, 1e-12, 4)):
        torch.testing.assert_close(inverse.T @ C @ inverse, torch.eye(4).double())
        assert (inverse.triu() == inverse).all()
        assert ((own > 0) & (own <= 1 + 1e-12)).all()
    both, _ = inverse_cholesky(torch.stack([C, 2 * C]))
    torch.testing.assert_close(both[0], inverse_cholesky(C)[0])


def test_a_deficient_matrix_has_nothing_of_its_own_where_cholesky_fails(rng):
    A = torch.randn(20, 4, generator=rng, dtype=torch.float64)
    A[:, 2] = A[:, 0] + A[:, 1]
    _, own = inverse_cholesky(A.T @ A)
    assert own.min() < 1e-12
    inverse, own = gram_schmidt(A.T @ A, 1e-10, 4)
    assert (own > 0).tolist() == [True, True, False, True]
    kept = [0, 1, 3]
    U = A @ inverse
    torch.testing.assert_close(U[:, kept].T @ U[:, kept], torch.eye(3).double())
    assert not U[:, 2].any()


def test_columns_beyond_the_number_of_directions_are_passed_over(rng):
    A = torch.randn(20, 4, generator=rng, dtype=torch.float64)
    inverse, own = gram_schmidt(A.T @ A, 1e-12, 2)
    assert not inverse[:, 2:].any()
    assert (own[:2] > 0).all()
    assert not own[2:].any()
