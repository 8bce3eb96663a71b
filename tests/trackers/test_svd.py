import pytest
import torch
from reference import projector_distance, rank_k_update
from streams import decaying_stream

from dome.trackers import IncrementalSVD, StreamingPower


@pytest.mark.parametrize("forget", [None, 0.3])
@pytest.mark.parametrize(
    ("dim", "rank", "num_samples"),
    [(120, 10, 32), (120, 30, 8), (20, 20, 9), (400, 12, 6)],
)
def test_updates_agree_with_an_explicit_svd(rng, dim, rank, num_samples, forget):
    tracker = IncrementalSVD(dim, rank, forget=forget, dtype=torch.float64)
    U = torch.zeros(dim, rank, dtype=torch.float64)
    lam = torch.zeros(rank, dtype=torch.float64)
    for t, G in enumerate(decaying_stream(rng, dim, num_samples, 100), start=1):
        newest = 1 / t if forget is None or t == 1 else forget
        U, lam = rank_k_update(U, lam, G, 1 - newest, newest)
        r = min(rank, t * (num_samples - 1), dim)
        tracker.update(G)
        assert tracker.effective_rank == r
        assert projector_distance(U[:, :r], tracker.basis[:, :r]) < 1e-9
        torch.testing.assert_close(tracker.eigenvalues[:r], lam[:r])


def test_columns_not_reached_yet_are_zero_and_remove_nothing(rng):
    tracker = IncrementalSVD(50, 10, dtype=torch.float64)
    g = torch.randn(50, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(tracker.project_out(g), g)
    tracker.update(torch.randn(4, 50, generator=rng, dtype=torch.float64))
    assert not tracker.basis[:, 3:].any()
    assert tracker.effective_rank == 3


def test_eigenvalues_are_sorted(rng):
    tracker = IncrementalSVD(100, 12)
    for G in decaying_stream(rng, 100, 7, 20, dtype=torch.float32):
        tracker.update(G)
        assert (tracker.eigenvalues.diff() <= 0).all()


def test_a_batch_folded_in_by_parts_comes_close_to_the_exact_update(rng, monkeypatch):
    batches = list(decaying_stream(rng, 80, 200, 5, decay=1.0))
    exact = IncrementalSVD(80, 10, dtype=torch.float64)
    for G in batches:
        exact.update(G)
    monkeypatch.setattr("dome.trackers.svd.ROWS_AT_ONCE", 25)
    parts = IncrementalSVD(80, 10, dtype=torch.float64)
    for G in batches:
        parts.update(G)
    # Truncating to rank 10 after each part loses a little of the tail only.
    torch.testing.assert_close(
        parts.eigenvalues[:5], exact.eigenvalues[:5], rtol=0.01, atol=0
    )
    assert projector_distance(parts.basis[:, :4], exact.basis[:, :4]) < 0.05
    torch.testing.assert_close(parts.last_update.total, batches[-1].square().sum(dim=1))


def test_captures_more_variance_than_the_power_method_after_few_updates(rng):
    batches = list(decaying_stream(rng, 400, 8, 10))
    G = torch.cat(batches)
    svd, power = IncrementalSVD(400, 20), StreamingPower(400, 20)
    for batch in batches:
        svd.update(batch.float())
        power.update(batch.float())
    captured = [(G.float() @ tracker.basis).square().sum() for tracker in (svd, power)]
    assert captured[0] > captured[1]
