import pytest
import torch

from dome.numerics import cpu, passes


def random(rng, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dim", [1, 3, 8, 25])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 5), (4, 5), (6, 2)])
def test_products_over_the_rows_are_those_of_whole_matrices(
    dim, num_rows, num_columns, rng
):
    A, C = random(rng, num_rows, dim), random(rng, dim, num_columns)
    torch.testing.assert_close(passes.multiply(A, C), A @ C)
    torch.testing.assert_close(passes.gram(C), C.T @ C)
    torch.testing.assert_close(passes.squared_norms(A), A.square().sum(dim=1))


def test_sixteen_bits_are_multiplied_in_thirty_two(rng):
    A = random(rng, 4, 40, dtype=torch.bfloat16)
    C = random(rng, 40, 5, dtype=torch.bfloat16)
    exact = A.double() @ C.double()
    # Products of float32: 40 roundings of 6e-8 each.
    torch.testing.assert_close(passes.multiply(A, C), exact, rtol=1e-5, atol=1e-5)


def test_products_may_be_formed_in_another_precision(rng):
    A = random(rng, 4, 40)
    product = passes.multiply(A, A.T, torch.float32)
    assert not torch.equal(product, passes.multiply(A, A.T))
    torch.testing.assert_close(product, A @ A.T, rtol=1e-5, atol=1e-5)


def test_products_of_pieces_take_little_room_at_a_time(monkeypatch, rng):
    seen, kernel = [], passes.sum_of_pieces
    monkeypatch.setattr(cpu, "SUMMANDS", 40)
    monkeypatch.setattr(
        passes, "sum_of_pieces", lambda a, c: seen.append(len(c)) or kernel(a, c)
    )
    A = random(rng, 4, 50)
    torch.testing.assert_close(passes.multiply(A, A.T), A @ A.T)
    assert max(seen) == 40 // 16 * cpu.PIECE_ROWS


@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 8, 40])
def test_subtracting_a_combination_equals_the_formula(dim, storage, rng):
    S, c = random(rng, dim, 5, dtype=storage), random(rng, 5)
    dtype = passes.compute_dtype(storage)
    g = random(rng, dim, dtype=dtype)
    before = g.clone()
    exact = (g.double() - S.double() @ c).to(dtype)
    torch.testing.assert_close(passes.subtract_combination(g, S, c), exact)
    assert torch.equal(g, before)


@pytest.mark.parametrize("dim", [1, 2, 8, 40])
@pytest.mark.parametrize("kind", ["turn", "add", "both"])
def test_recombining_in_place_equals_the_formula(dim, kind, rng):
    S, G = random(rng, dim, 5), random(rng, 6, dim)
    P = None if kind == "add" else random(rng, 5, 5)
    X = None if kind == "turn" else random(rng, 6, 5)
    expected = S if P is None else S @ P
    if X is not None:
        expected = expected + G.T @ X
    passes.recombine_(S, P, None if X is None else G, X)
    torch.testing.assert_close(S, expected)


def test_nothing_to_turn_or_to_add_changes_nothing(rng):
    S = random(rng, 40, 5)
    before = S.clone()
    passes.recombine_(S, None)
    assert torch.equal(S, before)


def test_samples_are_prepared_block_by_block(rng):
    S, G, X = random(rng, 40, 5), random(rng, 6, 40), random(rng, 6, 5)
    expected = S + (G - G.mean(dim=0)).T @ X
    passes.recombine_(
        S, None, G, X, lambda block, dim, dtype: block - block.mean(dim, keepdim=True)
    )
    torch.testing.assert_close(S, expected)


def test_sixteen_bits_are_rounded_once(rng):
    S, P = random(rng, 20, 5, dtype=torch.bfloat16), random(rng, 5, 5)
    expected = (S.float() @ P.float()).bfloat16()
    passes.recombine_(S, P)
    assert torch.equal(S, expected)


def test_blocks_cover_every_row_once_and_are_longer_where_rows_are_short(monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_NUMBERS", 100)
    sizes = [passes.block_rows(width) for width in (0, 1, 5, 10, 20, 1000)]
    assert sizes == [99, 99, 18, 9, 3, 3]  # of whole pieces, three rows each
    rows = [
        i for part in passes.row_blocks(torch.empty(30, 1), 9) for i in range(30)[part]
    ]
    assert rows == list(range(30))


def test_a_device_is_given_few_large_blocks():
    there = torch.device("meta")
    assert passes.block_rows(100, there) == passes.DEVICE_NUMBERS // 100
