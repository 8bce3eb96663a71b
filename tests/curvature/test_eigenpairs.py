import pytest
import torch
from reference import gauss_newton, hessian, projector_distance
from torch import nn
from torch.nn.functional import cross_entropy

from dome.curvature import DegenerateMatrixError, GaussNewton, Hessian, top_eigenpairs

CPU = torch.device("cpu")


class Explicit:
    """A matrix that is there in full."""

    def __init__(self, matrix):
        self.matrix, self.dim, self.device = matrix, len(matrix), CPU

    def __matmul__(self, vector):
        return self.matrix @ vector


class InFloat32(Explicit):
    def __matmul__(self, vector):
        return self.matrix.float() @ vector.float()


def with_eigenvalues(rng, values):
    n = len(values)
    Q = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64)).Q
    return Explicit(Q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ Q.T), Q


@pytest.mark.parametrize(
    ("kind", "twin"), [(Hessian, hessian), (GaussNewton, gauss_newton)]
)
def test_eigenpairs_are_those_of_the_explicit_matrix(rng, kind, twin):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(30, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(4, (30,), generator=rng)
    pairs = top_eigenpairs(
        kind(model, cross_entropy, (x, y), batch_size=15),
        3,
        tolerance=1e-10,
        dtype=torch.float64,
    )
    values, vectors = torch.linalg.eigh(twin(model, cross_entropy, x, y))
    torch.testing.assert_close(pairs.values, values.flip(0)[:3])
    distance = projector_distance(pairs.vectors, vectors.flip(1)[:, :3])
    # An eigenspace is as exact as the tolerance over the gap allows.
    assert distance < 1e-6


def test_the_largest_are_taken_and_not_the_most_negative(rng):
    matrix, _ = with_eigenvalues(rng, [-9.0, -8.0, *[0.1] * 30, 3.0, 5.0])
    pairs = top_eigenpairs(matrix, 2)
    torch.testing.assert_close(
        pairs.values, torch.tensor([5.0, 3.0], dtype=torch.float64), rtol=1e-3, atol=0
    )


def test_float32_products_are_enough_for_three_digits(rng):
    matrix, Q = with_eigenvalues(rng, [*[0.1] * 36, 2.0, 3.0, 5.0, 9.0])
    pairs = top_eigenpairs(InFloat32(matrix.matrix), 4)
    assert pairs.vectors.dtype == torch.float32
    assert projector_distance(pairs.vectors.double(), Q[:, -4:]) < 1e-3


def test_overlap_and_angles_with_a_basis(rng):
    matrix, Q = with_eigenvalues(rng, [*[0.1] * 36, 2.0, 3.0, 5.0, 9.0])
    pairs = top_eigenpairs(matrix, 4, tolerance=1e-12, dtype=torch.float64)
    assert pairs.overlap(Q[:, -4:]) == pytest.approx(1)
    assert pairs.overlap(Q[:, :4]) == pytest.approx(0, abs=1e-12)
    mixed = torch.cat([Q[:, -1:], Q[:, :1]], dim=1)
    assert pairs.overlap(mixed) == pytest.approx(0.5)
    assert pairs.overlap(mixed, num=1) == pytest.approx(1)
    angles = pairs.angles(mixed)
    assert angles[0] < 1e-6
    assert float(angles[1]) == pytest.approx(torch.pi / 2)
    with pytest.raises(ValueError, match="between 1 and 4"):
        pairs.overlap(mixed, num=5)


def test_the_same_call_gives_the_same_bits_and_a_generator_another_start(rng):
    matrix, _ = with_eigenvalues(rng, [*torch.rand(40, generator=rng).tolist()])
    first, again = top_eigenpairs(matrix, 2), top_eigenpairs(matrix, 2)
    assert torch.equal(first.vectors, again.vectors)
    other = top_eigenpairs(matrix, 2, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(first.vectors, other.vectors)
    torch.testing.assert_close(first.values, other.values, rtol=1e-3, atol=0)


def test_a_rank_that_is_too_large_is_refused(rng):
    matrix, _ = with_eigenvalues(rng, [1.0, 2.0, 3.0])
    for num in (0, 3, 4):
        with pytest.raises(ValueError, match=f"less than the 3 parameters, got {num}"):
            top_eigenpairs(matrix, num)
    with pytest.raises(ValueError, match="num_vectors must be more than num = 2"):
        top_eigenpairs(matrix, 2, num_vectors=2)


def test_what_does_not_converge_says_what_to_do(rng):
    matrix, _ = with_eigenvalues(rng, torch.linspace(1, 1.001, 200).tolist())
    with pytest.raises(
        RuntimeError, match=r"of 5 eigenpairs converged within .* fewer"
    ):
        top_eigenpairs(matrix, 5, tolerance=1e-12, max_products=25)


def test_products_that_are_not_finite_are_named():
    matrix = Explicit(torch.full((30, 30), torch.nan, dtype=torch.float64))
    with pytest.raises(DegenerateMatrixError, match="the model has diverged"):
        top_eigenpairs(matrix, 2)


def test_a_matrix_that_is_zero_is_named():
    matrix = Explicit(torch.zeros(30, 30, dtype=torch.float64))
    with pytest.raises(DegenerateMatrixError, match="The matrix is zero"):
        top_eigenpairs(matrix, 2)
