import pytest
import torch

from dome.numerics import lanes, linalg
from dome.numerics.tall import TALL, Tall, is_written_out


@pytest.fixture(autouse=True, params=[1, 3], ids=["one lane", "three lanes"])
def several_blocks(request, monkeypatch):
    monkeypatch.setattr(linalg, "BLOCK_ROWS", 7)
    monkeypatch.setattr(linalg, "BLOCK_NUMBERS", 0)
    monkeypatch.setattr(lanes.torch, "get_num_threads", lambda: request.param)


def filled(rng, dim, width, dtype=torch.float64, **options):
    matrix = Tall(dim, width, dtype, None, **options)
    matrix.U.copy_(torch.randn(dim, width, generator=rng, dtype=torch.float64))
    return matrix


def is_matrix(matrix):
    return len(matrix.state_dict()["mix"]) == 0


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 40])
@pytest.mark.parametrize("shape", ["full", "triangular", "diagonal"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("width", [1, 5, 17])
@pytest.mark.parametrize("may_turn", [True, False])
def test_moving_forth_and_back_equals_the_formula(
    dim, shape, centered, width, may_turn, rng
):
    matrix = filled(rng, dim, width, may_turn=may_turn)
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


@pytest.mark.parametrize("may_turn", [True, False])
def test_without_samples_it_is_a_product(may_turn, rng):
    matrix = filled(rng, 20, 5, may_turn=may_turn)
    P = torch.eye(5, dtype=torch.float64)
    P += 0.1 * torch.randn(5, 5, generator=rng, dtype=torch.float64)
    expected = matrix.U @ P
    matrix.recombine_(P)
    assert is_matrix(matrix) != may_turn
    torch.testing.assert_close(matrix.U, expected)


def test_sixteen_bits_are_rounded_once(rng):
    matrix = filled(rng, 20, 5, torch.bfloat16, may_turn=False)
    P = torch.randn(5, 5, generator=rng, dtype=torch.float64)
    expected = (matrix.U.float() @ P.float()).bfloat16()
    matrix.recombine_(P)
    assert torch.equal(matrix.U, expected)


def test_nothing_but_the_matrix_is_stored(rng):
    matrix = Tall(100, 5, torch.float32, None)
    assert matrix.U.untyped_storage().nbytes() == 100 * 5 * 4


def change(rng, dim, width, num_rows, turn=0.02):
    """A step that turns columns a little and shortens them, as those of a tracker."""
    P = 0.9 * torch.eye(width, dtype=torch.float64)
    P += turn * torch.randn(width, width, generator=rng, dtype=torch.float64).triu()
    G = 3 + torch.randn(num_rows, dim, generator=rng, dtype=torch.float64)
    M = 0.1 * torch.randn(num_rows, width, generator=rng, dtype=torch.float64)
    return P, G, M - M.mean(dim=0)


@pytest.mark.parametrize("num_rows", [2, 6, 40])
@pytest.mark.parametrize("width", [12, 30])  # rows that are aligned, and that are not
def test_a_product_gives_the_same_matrix_and_the_same_products(num_rows, width, rng):
    written = filled(rng, 41, width, may_turn=False)
    turned = Tall(41, width, torch.float64, None)
    turned.U.copy_(written.U)
    num_turned = 0
    for _ in range(20):
        P, G, M = change(rng, 41, width, num_rows, turn=0.1)
        for matrix in (written, turned):
            matrix.recombine_(P, G, M)
        assert is_matrix(written)
        num_turned += not is_matrix(turned)
        U = written.U
        torch.testing.assert_close(turned.U, U)
        torch.testing.assert_close(turned.gram(), U.T @ U)
        g = torch.randn(41, generator=rng, dtype=torch.float64)
        torch.testing.assert_close(turned.coordinates_of(g[None]), (g @ U)[None])
        c = torch.randn(width, generator=rng, dtype=torch.float64)
        torch.testing.assert_close(turned.subtract(g, c), g - U @ c)
        for pairwise in (True, False):
            seen = turned.products(G, pairwise=pairwise)
            expected = written.products(G, pairwise=pairwise)
            torch.testing.assert_close(seen.V, expected.V)
            torch.testing.assert_close(seen.m, expected.m)
        ours = turned.outside(G, seen.V, 0.5)
        theirs = written.outside(G, expected.V, 0.5)
        torch.testing.assert_close(ours, theirs)
    assert 0 < num_turned < 20


def test_reading_does_not_write_out_and_writing_out_does_not_change(rng):
    matrix = filled(rng, 40, 30)
    matrix.recombine_(*change(rng, 40, 30, 2))
    before = matrix.U.clone()
    assert not is_matrix(matrix)
    torch.testing.assert_close(matrix.settled(), before)
    assert is_matrix(matrix)


def test_rounding_is_not_magnified_by_more_than_is_allowed(rng):
    exact = filled(rng, 400, 10, may_turn=False)
    exact.U.copy_(torch.linalg.qr(exact.U)[0])
    short = Tall(400, 10, torch.float32, None)
    short.U.copy_(exact.U)
    num_turned = 0
    for _ in range(200):
        # Steps from one orthonormal basis to the next, far enough apart.
        P, G, M = change(rng, 400, 10, 3, turn=0.1)
        M /= 5
        U = exact.U @ P + (G - G.mean(dim=0)).T @ M
        inverse = torch.linalg.inv(torch.linalg.qr(U)[1])
        for matrix in (exact, short):
            matrix.recombine_(P @ inverse, G.to(matrix.dtype), M @ inverse)
        num_turned += not is_matrix(short)
        # Each of 200 steps rounds once, in any direction, which may count four times.
        limit = 4 * 200**0.5 * 2**-24
        assert (short.U - exact.U).norm(dim=0).max() < limit
    assert 50 < num_turned < 200


@pytest.mark.parametrize("kind", ["singular", "missing"])
def test_a_matrix_that_cannot_be_undone_is_written_out(kind, rng):
    matrix = filled(rng, 40, 5)
    P, G, M = change(rng, 40, 5, 2)
    P[2] = 0 if kind == "singular" else torch.nan
    expected = matrix.U @ P + G.T @ M
    matrix.recombine_(P, G, M)
    assert is_matrix(matrix)
    torch.testing.assert_close(matrix.U, expected, equal_nan=True)


def test_columns_do_not_grow_without_end(rng):
    matrix = filled(rng, 40, 5, torch.float32)
    U = matrix.U.clone()
    # A past of little weight, and samples that span the same columns again.
    eye = torch.eye(5, dtype=torch.float64)
    G, M = torch.cat([U.T, -U.T]), torch.cat([0.495 * eye, -0.495 * eye])
    for _ in range(30):
        matrix.recombine_(0.01 * eye, G, M)
    # Each of 30 steps rounds a few times.
    torch.testing.assert_close(matrix.U, U, rtol=1e-5, atol=1e-6)


def test_long_bases_are_kept_as_products_unless_in_sixteen_bits():
    assert not is_written_out(TALL * 10, 10, itemsize=4)
    assert not is_written_out(TALL * 10, 10, itemsize=8)
    assert is_written_out(TALL * 10 - 1, 10, itemsize=4)
    assert is_written_out(TALL * 10, 10, itemsize=2)
