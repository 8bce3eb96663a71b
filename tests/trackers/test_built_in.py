import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import center, fraction, largest_angle, offline_pca
from streams import decaying_stream, low_rank_stream

from dome.trackers import TRACKERS

every_tracker = pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())


def present_columns(tracker):
    """The basis without columns that the data has not reached yet."""
    return tracker.basis[:, tracker.basis.any(dim=0)].double()


def captured_variance(U, batches):
    """The trace of UᵀCU, C being the average covariance of the batches."""
    return sum((center(G.double()) @ U).square().sum() / len(G) for G in batches)


def orthogonality_error(tracker):
    U = present_columns(tracker)
    return (U.T @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max()


@every_tracker
def test_finds_the_subspace_of_offline_pca(make, rng):
    batches = list(low_rank_stream(rng, 100, 30, 100, rank=4))
    tracker = make(100, 4, dtype=torch.float64)
    for G in batches:
        tracker.update(G)
    expected, values = offline_pca(batches, 4)
    # The stream's own noise is 1e-3 of the signal: no tracker sees below that.
    assert largest_angle(expected, tracker.basis) < 2e-3
    # A power iteration's column norms lag behind by its first few updates.
    torch.testing.assert_close(
        tracker.eigenvalues.sum(), values.sum(), rtol=0.1, atol=0
    )


@every_tracker
def test_agrees_with_scikit_learn_on_one_batch_of_low_rank(make, rng):
    decomposition = pytest.importorskip("sklearn.decomposition")
    (G,) = low_rank_stream(rng, 50, 60, 1, rank=5, noise=0.0)
    tracker = make(50, 5, dtype=torch.float64)
    tracker.update(G)
    pca = decomposition.PCA(n_components=5).fit(G.numpy())
    components = torch.from_numpy(pca.components_).T.contiguous()
    assert largest_angle(components, tracker.basis) < 1e-7


@every_tracker
@pytest.mark.parametrize(
    ("dim", "rank", "num", "decay"),
    [
        (500, 20, 500, 0.5),
        (500, 20, 500, 1.0),
        pytest.param(500, 20, 5000, 1.0, marks=pytest.mark.slow),
    ],
)
def test_float32_stays_orthonormal(make, dim, rank, num, decay, rng):
    tracker = make(dim, rank)
    for G in decaying_stream(rng, dim, 6, num, decay, torch.float32):
        tracker.update(G)
    assert orthogonality_error(tracker) < 1e-5
    assert tracker.orthogonality_error < 1e-5


@every_tracker
@pytest.mark.parametrize("num_samples", [5, 40], ids=["B<k", "B>k"])
def test_the_record_of_an_update_is_what_the_new_basis_captures(make, num_samples, rng):
    tracker = make(200, 15, dtype=torch.float64)
    for G in decaying_stream(rng, 200, num_samples, 10):
        before = present_columns(tracker)
        G.add_(3.0)  # a mean that is not zero
        tracker.update(G)
        seen = tracker.last_update
        ratio = (seen.captured / seen.total).sqrt().mean()
        torch.testing.assert_close(ratio, fraction(tracker.basis, G))
        torch.testing.assert_close(seen.total, G.square().sum(dim=1))
    overlap = (before.T @ present_columns(tracker)).square().sum() / before.shape[1]
    torch.testing.assert_close(seen.drift, (1 - overlap).sqrt())


@every_tracker
def test_filtering_twice_is_filtering_once(make, rng):
    tracker = make(60, 8, dtype=torch.float64)
    for G in decaying_stream(rng, 60, 12, 5):
        tracker.update(G)
    g = torch.randn(60, generator=rng, dtype=torch.float64)
    once = tracker.project_out(g)
    torch.testing.assert_close(tracker.project_out(once), once)
    torch.testing.assert_close(once, g - tracker.basis @ (tracker.basis.T @ g))
    half = tracker.project_out(g, strength=0.5)
    torch.testing.assert_close(half, (g + once) / 2)


@every_tracker
def test_full_rank_leaves_nothing(make, rng):
    tracker = make(10, 10, dtype=torch.float64)
    for G in decaying_stream(rng, 10, 30, 3):
        tracker.update(G)
    g = torch.randn(10, generator=rng, dtype=torch.float64)
    assert tracker.project_out(g).norm() < 1e-12 * g.norm()


@every_tracker
@pytest.mark.parametrize(
    ("dtype", "oversample"),
    [
        *[(torch.float32, 0), (torch.float32, 5)],
        *[(torch.float64, 5), (torch.bfloat16, 5)],
    ],
)
def test_resumes_bit_for_bit(make, dtype, oversample, rng):
    # A hundred updates after a check of the basis there is another.
    batches = list(decaying_stream(rng, 500, 6, 205, dtype=torch.float32))
    straight = make(500, 10, dtype=dtype, oversample=oversample)
    for G in batches[:105]:
        straight.update(G)
    saved = {name: value.clone() for name, value in straight.state_dict().items()}
    # Another seed: what counts must come from the state.
    resumed = make(500, 10, dtype=dtype, oversample=oversample, generator=rng)
    resumed.load_state_dict(saved)
    for G in batches[105:]:
        straight.update(G)
        resumed.update(G)
    assert torch.equal(straight.basis, resumed.basis)
    assert torch.equal(straight.eigenvalues, resumed.eigenvalues)
    assert straight.effective_rank == resumed.effective_rank
    assert straight.orthogonality_error == resumed.orthogonality_error


@every_tracker
def test_a_state_of_another_shape_or_storage_is_refused(make):
    saved = make(20, 3).state_dict()
    with pytest.raises(ValueError, match=r"saved basis has shape \(20, 3\).*\(20, 4\)"):
        make(20, 4).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"stored as torch\.float32.*basis_dtype"):
        make(20, 3, dtype=torch.float64).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"Q has shape \(5, 3\).*older version"):
        make(20, 3).load_state_dict(saved | {"mix": torch.zeros(5, 3).double()})


@every_tracker
def test_the_order_of_samples_does_not_matter(make, rng):
    one, other = (make(60, 8, dtype=torch.float64) for _ in range(2))
    for G in decaying_stream(rng, 60, 20, 10):
        one.update(G)
        other.update(G[torch.randperm(20, generator=rng)])
    assert largest_angle(one.basis, other.basis) < 1e-9


@every_tracker
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_scaling_samples_scales_eigenvalues_by_its_square(make, factor, rng):
    plain, scaled, told = (make(60, 8, dtype=torch.float64) for _ in range(3))
    for G in decaying_stream(rng, 60, 20, 10):
        plain.update(G)
        scaled.update(factor * G)
        told.update(G, scale=factor)
    assert largest_angle(plain.basis, scaled.basis) < 1e-9
    assert largest_angle(plain.basis, told.basis) < 1e-9
    torch.testing.assert_close(scaled.eigenvalues, factor**2 * plain.eigenvalues)
    torch.testing.assert_close(told.eigenvalues, factor**2 * plain.eigenvalues)


@every_tracker
def test_a_large_mean_does_not_disturb_the_subspace(make, rng):
    batches = list(decaying_stream(rng, 200, 10, 20, dtype=torch.float32))
    plain, shifted = make(200, 6), make(200, 6)
    mean = 300 * torch.randn(200, generator=rng)
    for G in batches:
        plain.update(G)
        shifted.update(G + mean)
    # Adding the mean itself rounds the samples to 300 * 6e-8 of their unit size.
    assert largest_angle(plain.basis, shifted.basis) < 1e-2
    assert orthogonality_error(shifted) < 1e-5


@every_tracker
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_samples", [4, 30])
def test_a_sample_that_is_not_finite_is_left_out_counted_and_said_once(
    make, bad, num_samples, rng
):
    tracker = make(40, 5)
    good = torch.randn(num_samples, 40, generator=rng)
    tracker.update(good)
    before = {name: value.clone() for name, value in tracker.state_dict().items()}
    poisoned = good.clone()
    poisoned[1, 7] = bad
    with pytest.warns(RuntimeWarning, match="not finite"):
        tracker.update(poisoned)
    tracker.update(poisoned)  # no second warning: warnings are errors in these tests
    after = tracker.state_dict()
    assert tracker.num_skipped == 2
    assert all(
        torch.equal(value, after[name])
        for name, value in before.items()
        if name != "num_skipped"
    )


@every_tracker
def test_one_sample_has_no_covariance_and_is_left_out(make, rng):
    tracker = make(40, 5)
    with pytest.warns(RuntimeWarning, match="one sample"):
        tracker.update(torch.randn(1, 40, generator=rng))
    assert tracker.num_skipped == 1
    assert tracker.effective_rank == 0


@every_tracker
def test_bfloat16_storage_tracks_nearly_the_same_subspace(make, rng):
    batches = list(decaying_stream(rng, 2000, 10, 60, 1.0, torch.float32))
    small, full = make(2000, 8, dtype=torch.bfloat16), make(2000, 8)
    for G in batches:
        small.update(G)
        full.update(G)
    captured = [captured_variance(present_columns(t), batches) for t in (small, full)]
    assert small.basis.dtype == torch.bfloat16
    assert captured[0] > 0.99 * captured[1]
    # Eight bits of mantissa: 2^-8 an entry, averaged over 2,000 of them.
    assert orthogonality_error(small) < 5e-3


@every_tracker
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dim": 5, "rank": 6},
            "rank must be between 1 and the number of parameters 5",
        ),
        ({"dim": 5, "rank": 0}, "rank must be between 1"),
        ({"dim": 0, "rank": 1}, "dim must be at least 1"),
        ({"dim": 5, "rank": 2, "forget": 1.5}, "forget must be None"),
        ({"dim": 5, "rank": 2, "oversample": -1}, "oversample must not be negative"),
        ({"dim": 5, "rank": 2, "dtype": torch.int32}, "dtype must be one of"),
    ],
)
def test_bad_arguments_are_refused_by_name(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@every_tracker
@pytest.mark.parametrize("shape", [(3, 7), (8,), (2, 3, 8)])
def test_samples_of_the_wrong_shape_are_refused(make, shape):
    with pytest.raises(ValueError, match=r"samples must have shape \(B, 8\)"):
        make(8, 2).update(torch.zeros(shape))


@every_tracker
def test_integer_samples_and_gradients_of_another_length_are_refused(make):
    with pytest.raises(ValueError, match="floating point"):
        make(8, 2).update(torch.zeros(3, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"gradient must have shape \(8,\)"):
        make(8, 2).project_out(torch.zeros(7))


@every_tracker
def test_samples_are_not_changed(make, rng):
    G = torch.randn(6, 30, generator=rng)
    copy = G.clone()
    make(30, 4).update(G)
    assert torch.equal(G, copy)


degenerate = st.sampled_from(
    ["plain", "zero", "duplicate", "two rows", "tiny", "one column"]
)


@every_tracker
@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 40),
    num_samples=st.integers(2, 50),
    kinds=st.lists(degenerate, min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    data=st.data(),
)
def test_degenerate_batches_never_give_nan_or_a_skewed_basis(
    make, dim, num_samples, kinds, dtype, data
):
    rank = data.draw(st.integers(1, dim), label="rank")
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    tracker = make(dim, rank, dtype=dtype, oversample=data.draw(st.integers(0, 3)))
    for kind in kinds:
        G = torch.randn(num_samples, dim, generator=rng)
        if kind == "zero":
            G.zero_()
        elif kind == "duplicate":
            G[:] = G[0].clone()
        elif kind == "two rows":
            G[1:] = G[-1].clone()
        elif kind == "tiny":
            G *= 1e-12
        elif kind == "one column":
            G[:, 1:] = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tracker.update(G)
        assert tracker.basis.isfinite().all()
        assert tracker.eigenvalues.isfinite().all()
        assert (tracker.eigenvalues >= 0).all()
        assert 0 <= tracker.effective_rank <= dim
        if tracker.basis.any():
            limit = 0.05 if dtype == torch.bfloat16 else 1e-5
            assert orthogonality_error(tracker) < limit
    assert tracker.num_skipped == 0
