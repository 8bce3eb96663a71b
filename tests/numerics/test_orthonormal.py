import pytest
import torch
from reference import projector_distance

from dome.numerics import orthonormal
from dome.numerics.orthonormal import gram_schmidt, inverse_cholesky
from dome.numerics.shard import Shard
from dome.numerics.together import together


def orthonormalize_(U, rng, fill=None):
    fill = torch.zeros(U.shape[1], dtype=torch.bool) if fill is None else fill
    steps = orthonormal.orthonormalize_(
        U, rng, Shard.whole(len(U)), fill, int(fill.sum())
    )
    return together([steps])[0]


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


def test_both_factors_of_a_full_rank_gram_matrix_are_its_cholesky_factor(rng):
    A = 3 * torch.randn(2, 20, 4, generator=rng, dtype=torch.float64)
    C = A.mT @ A
    eye = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    for inverse, own in (inverse_cholesky(C), gram_schmidt(C, 1e-12, 4)):
        torch.testing.assert_close(inverse.mT @ C @ inverse, eye)
        assert (inverse.triu() == inverse).all()
        assert ((own > 0) & (own <= 1 + 1e-12)).all()
    one, _ = inverse_cholesky(C[1])
    torch.testing.assert_close(one, inverse_cholesky(C)[0][1])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_square_matrices_become_orthonormal_however_skewed(dtype):
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        U = torch.zeros(30, 30, dtype=dtype)
        orthonormalize_(U, generator, torch.ones(30, dtype=torch.bool))
        assert error_of(U) < 1e-5
