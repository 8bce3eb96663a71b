import pytest
import torch
from reference import largest_angle, rank_k_update
from streams import low_rank_stream

from dome.reference import update_sub
from dome.trackers import TRACKERS, IncrementalSVD, StreamingPower

every_tracker = pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())


@every_tracker
@pytest.mark.parametrize("size", [1e-18, 1e18])
@pytest.mark.parametrize("num_samples", [64, 6], ids=["columns", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_subspace_does_not_depend_on_the_size_of_samples(
    make, size, num_samples, dtype, rng
):
    tracker, plain = (make(1000, 4, dtype=dtype) for _ in range(2))
    for G in low_rank_stream(rng, 1000, num_samples, 6, rank=4):
        tracker.update((G * size).float())
        plain.update(G.float())
    assert tracker.num_skipped == 0
    # What float32 keeps of samples; eight bits of a basis are 2^-9 off an entry.
    limit = 1e-3 if dtype == torch.float32 else 2e-2
    assert largest_angle(plain.basis.double(), tracker.basis.double()) < limit
    scaled = tracker.eigenvalues / size / size
    torch.testing.assert_close(scaled, plain.eigenvalues, rtol=0.02, atol=0)


def test_tiny_samples_follow_algorithm_two(rng):
    tracker = StreamingPower(1000, 4)
    U, lam = tracker.basis.double(), torch.ones(4, dtype=torch.float64)
    for t, G in enumerate(low_rank_stream(rng, 1000, 64, 8, rank=4), start=1):
        tracker.update((1e-15 * G).float())
        U, lam = update_sub(U, lam, G, t)
    assert largest_angle(U, tracker.basis.double()) < 1e-3


@every_tracker
@pytest.mark.parametrize("oversample", [0, 3])
def test_one_sample_that_is_far_too_long_leaves_everything_finite(
    make, oversample, rng
):
    tracker = make(300, 6, oversample=oversample)
    batches = list(low_rank_stream(rng, 300, 30, 12, rank=6))
    batches[4][3] *= 1e11
    for G in batches:
        tracker.update(G.float())
        U = tracker.basis[:, tracker.basis.any(dim=0)].double()
        assert (U.T @ U - torch.eye(U.shape[1])).abs().max() < 1e-5
        assert tracker.eigenvalues.isfinite().all()
        assert (tracker.eigenvalues >= 0).all()
        assert 0 <= tracker.effective_rank <= 6 + oversample
    assert tracker.num_skipped == 0


@every_tracker
def test_samples_beyond_any_range_are_left_out_and_counted(make, rng):
    tracker = make(50, 4)
    good = torch.randn(8, 50, generator=rng)
    tracker.update(good)
    before = tracker.basis.clone()
    with pytest.warns(RuntimeWarning, match="not finite"):
        tracker.update(good * 1e38 * 1e38)
    assert torch.equal(tracker.basis, before)
    assert tracker.num_skipped == 1


def test_a_large_batch_by_parts_does_not_depend_on_its_size_either(rng, monkeypatch):
    monkeypatch.setattr("dome.trackers.svd.ROWS_AT_ONCE", 20)
    tiny, plain = IncrementalSVD(200, 4), IncrementalSVD(200, 4)
    for G in low_rank_stream(rng, 200, 64, 3, rank=4):
        tiny.update((G * 1e-18).float())
        plain.update(G.float())
    assert largest_angle(plain.basis, tiny.basis) < 1e-3


def literal(name, U, lam, G, t):
    """One step of the method in float64; the leading 4 directions of its Y."""
    if name == "svd":
        U, lam = rank_k_update(U, lam, G, (t - 1) / t, 1 / t)
        return U, lam, U[:, :4]
    H = G - G.mean(dim=0)
    Y = H.T @ (H @ U) / len(G)
    Y = Y if t == 1 else (t - 1) / t * U * lam + Y / t
    U, lam = update_sub(U, lam, G, t)
    return U, lam, torch.linalg.svd(Y, full_matrices=False)[0][:, :4]


@pytest.mark.parametrize(
    ("size", "samples"),
    [
        *[(1e-18, torch.float32), (1e18, torch.float32), (1e-9, torch.bfloat16)],
        *[(1e18, torch.bfloat16), (1e-18, torch.float64), (1e9, torch.float64)],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_samples", "oversample"), [(40, 0), (40, 3), (6, 0)], ids=str
)
@pytest.mark.parametrize("name", TRACKERS)
def test_samples_of_any_size_and_precision_follow_the_literal_twin(
    name, size, samples, num_samples, oversample, rng
):
    tracker = TRACKERS[name](400, 4, oversample=oversample)
    U, lam = tracker.columns.double(), torch.ones(4 + oversample, dtype=torch.float64)
    lam = lam if name == "power" else 0 * lam
    for t, G in enumerate(low_rank_stream(rng, 400, num_samples, 6, rank=4), start=1):
        sized = (G / G.norm(dim=1).mean() * size).to(samples)
        tracker.update(sized)
        U, lam, leading = literal(name, U, lam, sized.double() / size, t)
    assert tracker.num_skipped == 0
    assert largest_angle(leading, tracker.basis.double()) < 1e-3


@every_tracker
@pytest.mark.parametrize("size", [1e100, 1e-100])
@pytest.mark.filterwarnings("ignore:dome left a batch out")
def test_float64_samples_beyond_what_eigenvalues_can_be_change_no_direction(
    make, size, rng
):
    tracker = make(50, 4, dtype=torch.float64)
    good = torch.randn(8, 50, generator=rng, dtype=torch.float64)
    tracker.update(good)
    before = tracker.basis.clone()
    tracker.update(good.flip(1) * size)
    tracker.update(good.flip(1) * 1e300)
    assert tracker.num_skipped == (1 if size < 1 else 2)
    assert largest_angle(before, tracker.basis) < 1e-7
    assert tracker.eigenvalues.isfinite().all()
