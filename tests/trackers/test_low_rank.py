import pytest
import torch
from reference import (
    cut_by_power_step,
    cut_by_svd,
    largest_angle,
    low_rank_update,
    positive_qr,
    projector,
    projector_distance,
)
from streams import decaying_stream, low_rank_stream

from dome.reference import update_sub
from dome.trackers import directions
from dome.trackers.factors import (
    FactorBatch,
    Maps,
    OneHot,
    Patches,
    Product,
    Use,
    Vectors,
)
from dome.trackers.low_rank import LowRankPower

SHAPES = [torch.Size(s) for s in ((8, 6), (7,), (6, 3, 2, 2), (9, 5), (3, 4), (4,))]
DIM = sum(shape.numel() for shape in SHAPES)


def written_out(tracker):
    return tracker._U.written_out()


@pytest.mark.parametrize("num_samples", [64, 9], ids=["B>k", "B near k"])
def test_nothing_cut_is_algorithm_two(rng, monkeypatch, num_samples):
    # As thin products all the same: they must not lose anything where they need not.
    monkeypatch.setattr(directions, "is_thin", lambda shape, *_: len(shape) > 1)
    shapes = [torch.Size(s) for s in ((4, 6), (9, 4), (7,), (4, 2, 3))]
    dim = sum(shape.numel() for shape in shapes)
    tracker = LowRankPower(shapes, 6, 4, dtype=torch.float64)
    U, lam = tracker.basis, torch.ones(6, dtype=torch.float64)
    for t, G in enumerate(decaying_stream(rng, dim, num_samples, 200), start=1):
        tracker.update(G / 3, 3.0)
        U, lam = update_sub(U, lam, G, t)
        assert projector_distance(U, tracker.basis) < 1e-9
        torch.testing.assert_close(tracker.eigenvalues, lam)


def test_columns_as_they_are_follow_algorithm_two(rng):
    tracker = LowRankPower(SHAPES, 5, 100, dtype=torch.float64)
    U, lam = tracker.basis, torch.ones(5, dtype=torch.float64)
    for t, G in enumerate(decaying_stream(rng, DIM, 20, 50), start=1):
        tracker.update(G)
        U, lam = update_sub(U, lam, G, t)
        assert projector_distance(U, tracker.basis) < 1e-9
        torch.testing.assert_close(tracker.eigenvalues, lam)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_cut_by_power_steps_agrees_with_its_literal_twin(rng, rank):
    tracker = LowRankPower(SHAPES, 5, rank, dtype=torch.float64)
    U, lam = written_out(tracker), torch.ones(5, dtype=torch.float64)
    for t, G in enumerate(decaying_stream(rng, DIM, 20, 50), start=1):
        tracker.update(G)
        U, lam = low_rank_update(U, lam, G, t, SHAPES, rank, cut_by_power_step)
        assert projector_distance(positive_qr(U)[0], tracker.basis) < 1e-9
        torch.testing.assert_close(tracker.eigenvalues, lam)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_steps_keep_nearly_what_the_best_cut_keeps(rng, rank):
    shapes = [torch.Size((20, 30)), torch.Size((24, 12)), torch.Size((10,))]
    dim = sum(shape.numel() for shape in shapes)
    batches = list(decaying_stream(rng, dim, 40, 60))
    tracker = LowRankPower(shapes, 5, rank, dtype=torch.float64)
    U, lam = written_out(tracker), torch.ones(5, dtype=torch.float64)
    for t, G in enumerate(batches, start=1):
        tracker.update(G)
        U, lam = low_rank_update(U, lam, G, t, shapes, rank, cut_by_svd)
    ours, best = (
        sum((G @ W).square().sum() for G in batches)
        for W in (tracker.basis, positive_qr(U)[0])
    )
    assert ours > 0.9 * best


def test_what_is_removed_is_the_projection_on_the_stored_span(rng):
    tracker = LowRankPower(SHAPES, 5, 2, dtype=torch.float64)
    for G in decaying_stream(rng, DIM, 20, 10):
        tracker.update(G)
    g = torch.randn(DIM, generator=rng, dtype=torch.float64)
    U = written_out(tracker)
    expected = g - U @ torch.linalg.solve(U.T @ U, U.T @ g)
    torch.testing.assert_close(tracker.project_out(g), expected)
    half = tracker.project_out(g, 0.5)
    torch.testing.assert_close(half, (g + expected) / 2)
    every = [torch.linalg.matrix_rank(U[:48, j].view(8, 6)).item() for j in range(5)]
    assert every == [2] * 5
    torch.testing.assert_close(
        projector(tracker.basis), U @ torch.linalg.inv(U.T @ U) @ U.T
    )


def products(rng):
    """Samples as products, one for each kind of side, and the same as rows."""

    def draw(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    words = torch.randint(9, (20, 7), generator=rng)
    image = Patches(draw(20, 3, 9, 7), (2, 2), (2, 1), (1, 0), (1, 2))
    pieces = {
        0: [Product(Vectors(draw(20, 4, 8)), Vectors(draw(20, 4, 6)))],
        55: [Product(Maps(draw(20, 6, *image.places)), image)],
        127: [Product(OneHot(words, 9), Vectors(draw(20, 7, 5)))] * 2,
    }
    rows = torch.zeros(20, DIM, dtype=torch.float64)
    for start, some in pieces.items():
        for product in some:
            found = product.rows()
            torch.testing.assert_close(product.total(), found.sum(0))
            rows[:, start : start + found[0].numel()] += found.flatten(1)
    uses = {s: [Use(slice(0, 20), p) for p in some] for s, some in pieces.items()}
    vector = draw(20, 7)
    rows[:, 48:55] = vector
    uses[48] = [Use(slice(0, 12), vector[:12]), Use(slice(12, 20), vector[12:])]
    return FactorBatch(20, uses), rows


def test_products_are_folded_in_as_their_rows_are(rng):
    ours, twin = (LowRankPower(SHAPES, 5, 2, dtype=torch.float64) for _ in range(2))
    for _ in range(10):
        batch, rows = products(rng)
        ours.update(batch, 0.5)
        twin.update(rows, 0.5)
        assert largest_angle(twin.basis, ours.basis) < 1e-7
        torch.testing.assert_close(ours.eigenvalues, twin.eigenvalues)


def test_rows_of_large_weights_give_what_those_of_small_ones_do(rng, monkeypatch):
    """Where U C + Gᵀ M would be as large as the exact basis, it is not formed."""
    trackers = [LowRankPower(SHAPES, 5, 2, dtype=torch.float64) for _ in range(2)]
    for G in decaying_stream(rng, DIM, 20, 12):
        for tracker, small in zip(trackers, (1 << 16, 0), strict=True):
            monkeypatch.setattr(directions, "SMALL_WEIGHT", small)
            tracker.update(G)
    assert projector_distance(*(tracker.basis for tracker in trackers)) < 1e-9
    torch.testing.assert_close(*(tracker.eigenvalues for tracker in trackers))


def test_a_state_from_a_file_without_strides_goes_on_bit_for_bit(rng):
    """As safetensors and torch.distributed.checkpoint write them."""
    batches = list(decaying_stream(rng, DIM, 20, 6))
    tracker, again = (LowRankPower(SHAPES, 5, 2) for _ in range(2))
    for G in batches[:3]:
        tracker.update(G.float())
    state = tracker.state_dict()
    plain = torch.contiguous_format
    again.load_state_dict({n: t.clone(memory_format=plain) for n, t in state.items()})
    for G in batches[3:]:
        tracker.update(G.float())
        again.update(G.float())
    for name, value in tracker.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_batch_smaller_than_the_rank_fills_up_with_random_directions(rng):
    tracker = LowRankPower(SHAPES, 8, 2, dtype=torch.float64)
    batches = list(decaying_stream(rng, DIM, 4, 4))
    tracker.update(batches[0])
    assert tracker.effective_rank == pytest.approx(3, abs=1e-9)
    assert tracker.orthogonality_error < 1e-12
    for G in batches[1:]:
        tracker.update(G)
    assert 3 < tracker.effective_rank < 8
    assert tracker.eigenvalues.isfinite().all()


def test_weights_without_gradients_are_filled_and_found_again(rng):
    tracker = LowRankPower(SHAPES, 3, 2, dtype=torch.float64)
    (G, *others) = decaying_stream(rng, DIM, 20, 4)
    G[:, :48] = 0
    tracker.update(G)
    assert tracker.orthogonality_error < 1e-12
    assert tracker.basis[:48].abs().max() == 0
    for later in others:
        tracker.update(later)
    ranks = [
        torch.linalg.matrix_rank(w.view(8, 6)) for w in written_out(tracker)[:48].T
    ]
    assert ranks == [2, 2, 2]


@pytest.mark.parametrize("size", [1e-18, 1e-10, 1e10, 1e18])
def test_the_subspace_does_not_depend_on_the_size_of_samples(size, rng):
    tracker, plain = (LowRankPower([(20, 30), (400,)], 4, 3) for _ in range(2))
    for G in low_rank_stream(rng, 1000, 64, 6, rank=4):
        tracker.update((G * size).float())
        plain.update(G.float())
    assert tracker.num_skipped == 0
    assert largest_angle(plain.basis.double(), tracker.basis.double()) < 1e-3
    scaled = tracker.eigenvalues / size / size
    torch.testing.assert_close(scaled, plain.eigenvalues, rtol=0.02, atol=0)


def test_one_sample_that_is_far_too_long_leaves_everything_finite(rng):
    tracker = LowRankPower([(20, 30)], 6, 3, oversample=2)
    batches = list(low_rank_stream(rng, 600, 30, 12, rank=6))
    batches[4][3] *= 1e11
    for G in batches:
        tracker.update(G.float())
        assert tracker.orthogonality_error < 1e-4
        assert tracker.eigenvalues.isfinite().all()
        assert 0 <= tracker.effective_rank <= 8


@pytest.mark.parametrize("oversample", [0, 2])
@pytest.mark.parametrize("forget", [None, 0.3])
def test_a_state_goes_on_bit_for_bit(rng, oversample, forget):
    options = {"oversample": oversample, "forget": forget}
    tracker = LowRankPower(SHAPES, 5, 2, **options)
    batches = [G.float() for G in decaying_stream(rng, DIM, 4, 8)]
    for G in batches[:4]:
        tracker.update(G)
    other = LowRankPower(
        SHAPES, 5, 2, generator=torch.Generator().manual_seed(7), **options
    )
    other.load_state_dict(tracker.state_dict())
    g = torch.randn(DIM, generator=rng)
    for G in batches[4:]:
        tracker.update(G)
        other.update(G)
        assert torch.equal(tracker.project_out(g), other.project_out(g))
    for name, value in tracker.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_state_of_another_direction_rank_is_refused():
    state = LowRankPower(SHAPES, 5, 2).state_dict()
    with pytest.raises(ValueError, match="direction_rank"):
        LowRankPower(SHAPES, 5, 1).load_state_dict(state)


def test_batches_that_are_not_finite_or_of_one_sample_are_left_out(rng):
    tracker = LowRankPower(SHAPES, 3, 2)
    g = torch.randn(DIM, generator=rng)
    with pytest.warns(RuntimeWarning, match="one sample"):
        tracker.update(torch.randn(1, DIM, generator=rng))
    assert torch.equal(tracker.project_out(g), g)
    G = torch.randn(8, DIM, generator=rng)
    tracker.update(G)
    before = tracker.basis
    for bad in (float("nan"), float("inf")):
        broken = G.clone()
        broken[3, 60] = bad
        tracker.update(broken)
    assert torch.equal(tracker.basis, before)
    assert tracker.num_skipped == 3
    g[2] = float("nan")
    filtered = tracker.project_out(g)
    assert torch.equal(filtered[3:], g[3:])


def test_a_constant_batch_turns_nothing(rng):
    tracker = LowRankPower(SHAPES, 3, 2)
    tracker.update(torch.randn(8, DIM, generator=rng))
    before, values = tracker.basis, tracker.eigenvalues
    tracker.update(torch.randn(DIM, generator=rng).expand(8, DIM))
    assert torch.equal(tracker.basis, before)
    torch.testing.assert_close(tracker.eigenvalues, values / 2)


def test_oversampling_removes_the_leading_directions(rng):
    tracker = LowRankPower(SHAPES, 3, 100, oversample=3, dtype=torch.float64)
    U, lam = None, torch.ones(6, dtype=torch.float64)
    U = written_out(tracker) @ tracker._T
    for t, G in enumerate(decaying_stream(rng, DIM, 30, 20), start=1):
        tracker.update(G)
        W, Y = U, None
        U, lam, Y = (*update_sub(W, lam, G, t), _y(W, lam, G, t))
        left = torch.linalg.svd(Y, full_matrices=False)[0][:, :3]
        assert largest_angle(left, tracker.basis) < 1e-6


def _y(U, lam, G, t):
    H = G - G.mean(0)
    W = H.T @ (H @ U) / len(G)
    return W if t == 1 else (t - 1) / t * U @ torch.diag(lam) + W / t


def test_a_weight_that_is_small_beside_the_others_is_kept_whole(rng):
    shapes = [torch.Size(s) for s in ((64, 300), (16, 20), (64, 64), (16,))]
    tracker = LowRankPower(shapes, 3, 2)
    tracker.update(torch.randn(8, sum(s.numel() for s in shapes), generator=rng))
    state = tracker.state_dict()
    assert state["left_0"].shape == (64, 6)
    assert state["left_1"].shape == (64, 6)  # 4,096 numbers, but a sixth of them all
    assert state["plain"].shape == (16 * 20 + 16, 3)
    assert "left_2" not in state
