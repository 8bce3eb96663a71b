import math

import pytest
import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.diagnostics import Drift, rms_sine
from dome.diagnostics.angles import principal_angles, subspace_overlap


def random_basis(rng, dim, num, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(dim, num, generator=rng, dtype=dtype)).Q


def turned(angles, dim):
    """Two bases whose principal angles are these."""
    V = torch.eye(dim, len(angles), dtype=torch.float64)
    W = torch.zeros_like(V)
    for i, angle in enumerate(angles):
        W[i, i], W[len(angles) + i, i] = math.cos(angle), math.sin(angle)
    return V, W


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7])
def test_angles_that_were_made_are_found_to_all_digits(rng, scale):
    angles = scale * torch.tensor([0.2, 0.5, 1.0, 1.5], dtype=torch.float64)
    V, W = turned(angles.tolist(), 12)
    # Any basis of the same subspaces, in any coordinates.
    Q, R = random_basis(rng, 12, 12), random_basis(rng, 4, 4)
    torch.testing.assert_close(
        principal_angles(Q @ V, Q @ W @ R), angles, rtol=1e-7, atol=1e-15
    )


@pytest.mark.parametrize(("num", "other"), [(3, 3), (5, 2), (2, 5)])
def test_angles_and_overlap_are_those_of_an_explicit_svd(rng, num, other):
    V, W = random_basis(rng, 9000, num), random_basis(rng, 9000, other)
    W = torch.linalg.qr(W + 3 * V[:, :1]).Q
    cosines = torch.linalg.svdvals(V.T @ W)
    torch.testing.assert_close(principal_angles(V, W), cosines.arccos())
    expected = float(cosines.square().mean())
    assert subspace_overlap(V, W) == pytest.approx(expected)


def test_float32_bases_are_compared_to_float32_precision(rng):
    V = random_basis(rng, 5000, 4, torch.float32)
    assert principal_angles(V, V.clone()).max() < 1e-5
    assert subspace_overlap(V, V) == pytest.approx(1, abs=1e-5)


def test_a_direction_that_is_not_there_yet_is_at_a_right_angle():
    V = torch.eye(5, 2)
    W = V.clone()
    W[:, 1] = 0
    assert principal_angles(V, W).tolist() == pytest.approx([0, math.pi / 2])


def test_bases_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="bases of 4 and 5 rows"):
        principal_angles(torch.eye(4, 2), torch.eye(5, 2))
    with pytest.raises(ValueError, match=r"got \(4,\)"):
        subspace_overlap(torch.ones(4), torch.eye(4))


@pytest.mark.parametrize("layout", ["global", "layerwise"])
def test_drift_compares_bases_n_steps_apart(rng, layout):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 2, layout=layout)
    drift, kept, found = Drift(every=3), [], []
    for x, y in batches(rng, 8):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
        kept.append([t.basis.clone() for t in grad_filter.trackers.values()])
        found.append(drift.observe(grad_filter.trackers))
    assert [f is not None for f in found] == [False] * 3 + [True, False] * 1 + [
        False,
        True,
        False,
    ]
    for now, before in ((3, 0), (6, 3)):
        pairs = zip(kept[before], kept[now], strict=True)
        expected = torch.cat([principal_angles(*pair) for pair in pairs]).sort().values
        torch.testing.assert_close(found[now], expected)


def test_drift_over_one_step_is_that_of_the_stats(rng):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 2, basis_dtype=torch.float64)
    drift = Drift(every=1)
    for x, y in batches(rng, 4):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        grad_filter.step()
        angles = drift.observe(grad_filter.trackers)
    # The record follows from small matrices, and from 1 − cos², which rounds at 1e-8.
    assert rms_sine(angles) == pytest.approx(grad_filter.stats.drift, abs=1e-6)


def test_drift_over_no_steps_is_refused():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Drift(every=0)
