import pytest
import torch
from reference import projector_distance

from dome.numerics.orthonormal import cholesky_in_order, orthonormalize_


def error_of(U):
    U = U.double()
    return (U.T @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max()


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_independent_columns_keep_their_span_in_order(condition, rng):
    A = torch.randn(50, 6, generator=rng, dtype=torch.float64)
    A *= torch.logspace(0, -torch.tensor(condition).log10().item(), 6).double()
    U = A.clone()
    orthonormalize_(U, rng)
    assert error_of(U) < 1e-13
    Q, _ = torch.linalg.qr(A)
    for j in range(1, 7):
        assert projector_distance(Q[:, :j], U[:, :j]) < 1e-9


def test_empty_and_dependent_columns_are_filled_and_the_others_kept(rng):
    A = torch.randn(30, 5, generator=rng, dtype=torch.float64)
    A[:, 1] = 0
    A[:, 3] = A[:, 0] - 2 * A[:, 2]
    U = A.clone()
    orthonormalize_(U, rng)
    assert error_of(U) < 1e-13
    kept = [0, 2, 4]
    assert projector_distance(torch.linalg.qr(A[:, kept])[0], U[:, kept]) < 1e-9


def test_a_square_matrix_with_one_column_left_open_is_completed(rng):
    U = torch.eye(8, dtype=torch.float64)
    U[:, 3] = 0
    orthonormalize_(U, rng, torch.arange(8) == 3)
    assert error_of(U) < 1e-13
    assert float(U[3, 3].abs()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_lower_precisions_end_at_their_rounding(dtype, limit, rng):
    U = torch.randn(500, 10, generator=rng).to(dtype)
    assert orthonormalize_(U, rng) < limit
    assert error_of(U) < limit


def test_the_factor_of_a_full_rank_gram_matrix_is_its_cholesky_factor(rng):
    A = torch.nn.functional.normalize(
        torch.randn(20, 4, generator=rng, dtype=torch.float64), dim=0
    )
    inverse, left = cholesky_in_order(A.T @ A, floor=1e-12)
    torch.testing.assert_close(inverse.T @ (A.T @ A) @ inverse, torch.eye(4).double())
    assert (left > 0).all()


def test_columns_beyond_the_number_of_directions_are_passed_over(rng):
    A = torch.nn.functional.normalize(
        torch.randn(20, 4, generator=rng, dtype=torch.float64), dim=0
    )
    inverse, left = cholesky_in_order(A.T @ A, floor=1e-12, most=2)
    assert not inverse[:, 2:].any()
    assert (left[:2] > 0).all()
    assert not left[2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_square_matrices_become_orthonormal_however_skewed(dtype):
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        U = torch.zeros(30, 30, dtype=dtype)
        orthonormalize_(U, generator, torch.ones(30, dtype=torch.bool))
        assert error_of(U) < 1e-5
