import pytest
import torch

from dome.numerics.factored import TALL, Factored, inverse_if_good, may_be_factored
from dome.numerics.products import Rows
from dome.numerics.shard import Shard
from dome.numerics.together import together


def run(steps):
    return together([steps])[0]


def filled(rng, dim, width, dtype=torch.float64, **options):
    U = Factored(Shard.whole(dim), width, dtype, None, **options)
    start = torch.linalg.qr(torch.randn(dim, width, generator=rng).double())[0]
    U.multiplied_out().copy_(start)
    return U


def recombine_(U, P, G, V, X):
    turn = run(U.turn(P))
    stays = bool(turn.is_good)
    U.recombine_(turn, Rows(G.to(U.dtype)), V, X, factored=stays)
    return stays


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
    plain.multiplied_out().copy_(factored.matrix)
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
        torch.testing.assert_close(run(factored.gram()), U.T @ U)
        torch.testing.assert_close(run(factored.coordinates(Rows(G, 0.5))), 0.5 * G @ U)
        seen, same = (run(each.products(Rows(G))) for each in (factored, plain))
        torch.testing.assert_close(seen.V, same.V)
        ours = run(factored.outside(Rows(G), seen.V))
        torch.testing.assert_close(ours, run(plain.outside(Rows(G), same.V)))
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
    torch.testing.assert_close(U.multiplied_out(), before)
    assert len(U.state_dict()["Q"]) == 0


def test_a_state_is_a_snapshot(rng):
    U = filled(rng, 640, 20)
    recombine_(U, *change(rng, 640, 20, 2))
    saved = U.state_dict()
    copies = {name: value.clone() for name, value in saved.items()}
    recombine_(U, *change(rng, 640, 20, 2))
    U.multiplied_out().zero_()
    assert all(torch.equal(saved[name], copies[name]) for name in copies)
    U.load_state_dict(saved)
    torch.testing.assert_close(U.matrix, copies["basis"] @ copies["Q"])


def test_rounding_is_not_magnified_by_more_than_is_allowed(rng):
    exact = filled(rng, 400, 10, factored=False)
    short = Factored(Shard.whole(400), 10, torch.float32, None)
    short.multiplied_out().copy_(exact.matrix)
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
    assert float(inverse_if_good(torch.eye(5).double())[1]) == 1
    assert float(inverse_if_good(Q)[1]) == 0


def test_long_bases_are_factored_unless_in_sixteen_bits():
    assert may_be_factored(TALL * 10, 10, itemsize=4)
    assert may_be_factored(TALL * 10, 10, itemsize=8)
    assert not may_be_factored(TALL * 10 - 1, 10, itemsize=4)
    assert not may_be_factored(TALL * 10, 10, itemsize=2)


def test_nothing_but_the_matrix_is_stored():
    U = Factored(Shard.whole(100), 5, torch.float32, None)
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
