import pytest
import torch
from reference import projector_distance

from dome.trackers import linalg
from dome.trackers.basis import TALL, FactoredBasis, may_be_factored
from dome.trackers.linalg import Shard
from dome.trackers.parts import parts_of
from dome.trackers.samples import Samples


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "CPU_NUMBERS", 700)


def empty(dim, width, dtype=torch.float64, **options):
    return FactoredBasis(Shard.whole(dim), width, dtype, None, seed=5, **options)


def filled(rng, dim, width, **options):
    U = empty(dim, width, **options)
    U.write_(torch.linalg.qr(torch.randn(dim, width, generator=rng).double())[0])
    return U


def recombine_(U, P, G, V, X):
    turn = U.turn(P)
    U.turn_(turn, *Samples(G.to(U.dtype)).combination(V, X))
    return turn.inverse is not None


def change(rng, dim, width, num_rows, turn=0.02):
    """A step that turns columns a little and shortens them, as those of a tracker."""
    P = 0.9 * torch.eye(width, dtype=torch.float64)
    P += turn * torch.randn(width, width, generator=rng, dtype=torch.float64).triu()
    G = 3 + torch.randn(num_rows, dim, generator=rng, dtype=torch.float64)
    V = torch.randn(num_rows, width, generator=rng, dtype=torch.float64)
    X = 0.1 * torch.randn(width, width, generator=rng, dtype=torch.float64)
    return P, G, V - V.mean(dim=0), X


@pytest.mark.parametrize(("dim", "width"), [(640, 20), (41, 5), (3, 3), (1, 1)])
def test_a_factored_matrix_is_the_matrix_and_has_its_products(dim, width, rng):
    factored, plain = filled(rng, dim, width), filled(rng, dim, width, factored=False)
    plain.write_(factored.matrix)
    num_factored = 0
    for _ in range(8):
        P, G, V, X = change(rng, dim, width, 6, turn=0.1)
        expected = plain.matrix @ P + (G - G.mean(dim=0)).T @ V @ X
        num_factored += recombine_(factored, P, G, V, X)
        assert not recombine_(plain, P, G, V, X)
        U = plain.matrix
        torch.testing.assert_close(U, expected)
        torch.testing.assert_close(factored.matrix, U)
        torch.testing.assert_close(factored.times(X[:, :1]), U @ X[:, :1])
        torch.testing.assert_close(factored.inner(parts_of(G)), G @ U)
        V = (G - G.mean(dim=0)) @ U
        ours = factored.outside(parts_of(G), V)
        torch.testing.assert_close(
            ours, plain.outside(parts_of(G), V), rtol=1e-9, atol=1e-9
        )
        g = torch.randn(dim, generator=rng, dtype=torch.float64)
        A = torch.linalg.qr(X)[0][:, :1]
        removed = U @ A @ (A.T @ (U.T @ g))
        torch.testing.assert_close(factored.project_out(g, A, 0.5), g - 0.5 * removed)
        whole = factored.project_out(g, None, 1.0)
        torch.testing.assert_close(whole, g - U @ (U.T @ g))
    assert (num_factored > 0) == may_be_factored(dim, width, 8)


def test_multiplying_out_changes_nothing_but_the_form(rng):
    U = filled(rng, 640, 20)
    assert recombine_(U, *change(rng, 640, 20, 2))
    before = U.matrix.clone()
    U.write_()
    torch.testing.assert_close(U.matrix, before)
    assert len(U.state_dict()["Q"]) == 0


def test_a_state_is_a_snapshot(rng):
    U = filled(rng, 640, 20)
    recombine_(U, *change(rng, 640, 20, 2))
    saved = U.state_dict()
    copies = {name: value.clone() for name, value in saved.items()}
    recombine_(U, *change(rng, 640, 20, 2))
    U.write_(torch.zeros(640, 20))
    assert all(torch.equal(saved[name], copies[name]) for name in copies)
    U.load_state_dict(saved)
    torch.testing.assert_close(U.matrix, copies["basis"] @ copies["Q"])


def test_rounding_is_not_magnified_by_more_than_is_allowed(rng):
    exact = filled(rng, 400, 10, factored=False)
    short = empty(400, 10, torch.float32)
    short.write_(exact.matrix)
    num_factored = 0
    for _ in range(200):
        # Steps from one orthonormal basis to the next, far enough apart.
        P, G, V, X = change(rng, 400, 10, 3, turn=0.1)
        X /= 20
        U = exact.matrix @ P + (G - G.mean(dim=0)).T @ V @ X
        inverse = torch.linalg.inv(torch.linalg.qr(U)[1])
        recombine_(exact, P @ inverse, G, V, X @ inverse)
        num_factored += recombine_(short, P @ inverse, G, V, X @ inverse)
        # Each of 200 steps rounds once, in any direction, which may count four times.
        limit = 4 * 200**0.5 * 2**-24
        assert (short.matrix - exact.matrix).norm(dim=0).max() < limit
    assert 50 < num_factored < 200


@pytest.mark.parametrize("kind", ["singular", "missing", "long"])
def test_a_turn_that_cannot_be_undone_is_not_good(kind):
    Q = torch.eye(5, dtype=torch.float64)
    Q[2] = {"singular": 0.0, "missing": torch.nan, "long": 1e-9}[kind] * Q[2]
    U = empty(TALL * 5, 5)
    assert U.turn(torch.eye(5).double()).inverse is not None
    assert U.turn(Q).inverse is None


def test_long_bases_are_factored_unless_in_sixteen_bits():
    assert may_be_factored(TALL * 10, 10, itemsize=4)
    assert may_be_factored(TALL * 10, 10, itemsize=8)
    assert not may_be_factored(TALL * 10 - 1, 10, itemsize=4)
    assert not may_be_factored(TALL * 10, 10, itemsize=2)


def test_nothing_but_the_matrix_is_stored():
    U = empty(100, 5, torch.float32)
    assert U.matrix.untyped_storage().nbytes() == 100 * 5 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"basis": s["basis"] * 2}, "not orthonormal"),
        (lambda s: s | {"basis": s["basis"] * torch.nan}, "not orthonormal"),
        (lambda s: s | {"Q": s["Q"] + 1}, "not orthonormal"),
        (lambda s: s | {"Q": s["Q"][:7]}, r"Q has shape \(7, 20\).*older"),
        (lambda s: s | {"basis": s["basis"][:, :3]}, "tracks 3 directions.*20 here"),
        (lambda s: s | {"basis": s["basis"].float()}, "stored as torch.float32"),
        (lambda s: {"basis": s["basis"]}, "no 'Q'"),
    ],
)
def test_what_is_no_basis_is_refused_by_name(change, message, rng):
    U = filled(rng, 640, 20)
    recombine_(U, *_towards_orthonormal(rng, U))
    with pytest.raises(ValueError, match=message):
        U.check_state(change(U.state_dict()), torch.ones(20, dtype=torch.bool))


def _towards_orthonormal(rng, U):
    P = torch.linalg.qr(torch.randn(20, 20, generator=rng).double())[0]
    zero = torch.zeros(20, 20, dtype=torch.float64)
    return P, torch.randn(3, 640, generator=rng), torch.zeros(3, 20).double(), zero


def made_orthonormal(A, fill=None):
    """Columns that ``orthonormalize_`` makes of these, and the error it tells."""
    U = empty(*A.shape, A.dtype)
    U.write_(A)
    fill = torch.zeros(A.shape[1], dtype=torch.bool) if fill is None else fill
    U.orthonormalize_(1, fill)
    return U.matrix, U.error


def error_of(U):
    U = U.double()
    return (U.T @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max()


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_independent_columns_keep_their_span_in_order(condition, rng):
    A = torch.randn(50, 6, generator=rng, dtype=torch.float64)
    A *= torch.logspace(0, -torch.tensor(condition).log10().item(), 6).double()
    U, _ = made_orthonormal(A)
    assert error_of(U) < 1e-13
    Q, _ = torch.linalg.qr(A)
    for j in range(1, 7):
        assert projector_distance(Q[:, :j], U[:, :j]) < 1e-9


def test_empty_and_dependent_columns_are_filled_and_the_others_kept(rng):
    A = torch.randn(30, 5, generator=rng, dtype=torch.float64)
    A[:, 1] = 0
    A[:, 3] = A[:, 0] - 2 * A[:, 2]
    U, _ = made_orthonormal(A)
    assert error_of(U) < 1e-13
    kept = [0, 2, 4]
    assert projector_distance(torch.linalg.qr(A[:, kept])[0], U[:, kept]) < 1e-9


def test_a_square_matrix_with_one_column_left_open_is_completed():
    A = torch.eye(8, dtype=torch.float64)
    A[:, 3] = 0
    U, _ = made_orthonormal(A, torch.arange(8) == 3)
    assert error_of(U) < 1e-13
    assert float(U[3, 3].abs()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_lower_precisions_end_at_their_rounding(dtype, limit, rng):
    U, told = made_orthonormal(torch.randn(500, 10, generator=rng).to(dtype))
    assert told < limit
    assert error_of(U) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_square_matrices_become_orthonormal_however_skewed(dtype):
    every = torch.ones(30, dtype=torch.bool)
    for seed in range(50):
        U = empty(30, 30, dtype)
        U.seed = seed
        U.orthonormalize_(0, every)
        assert error_of(U.matrix) < 1e-5
