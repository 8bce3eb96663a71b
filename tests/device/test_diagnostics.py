import dataclasses

import pytest
import torch
from device.agreement import assert_agree
from device.training import attached, seeded_batches, train
from models import small_classifier
from streams import decaying_stream
from torch.nn.functional import cross_entropy

import dome
from dome import diagnostics
from dome.curvature import Covariance, GaussNewton, Hessian, top_eigenpairs

F64 = torch.float64


def samples(rng, num=14, dim=60):
    (G,) = decaying_stream(rng, dim, num, 1, 1.0)
    return G


def of_samples(G):
    basis = torch.linalg.qr(G[:3].T).Q
    other = torch.linalg.qr(G[1:5].T).Q
    spectrum = diagnostics.batch_spectrum(G)
    values, vectors = diagnostics.covariance_eigenpairs(G, 3)
    return {
        "signal": dataclasses.astuple(diagnostics.signal_to_noise(G)),
        "signal outside": dataclasses.astuple(diagnostics.signal_to_noise(G, basis)),
        "spectrum": spectrum.eigenvalues,
        "outliers": spectrum.outliers,
        "share": spectrum.share(3),
        "gap": dataclasses.astuple(spectrum.eigengap),
        "entropy rank": float(diagnostics.entropy_rank(values)),
        "values": values,
        "projector": vectors @ vectors.T,
        "angles": diagnostics.principal_angles(basis, other[:, :3]),
        "overlap": float(diagnostics.subspace_overlap(basis, other)),
    }


def test_signal_spectrum_and_angles_are_those_of_the_cpu(device, rng):
    G = samples(rng)
    found = of_samples(G.to(device.name)), of_samples(G)
    # The cosine of a small angle keeps half its digits.
    angles = [f.pop("angles").cpu() for f in found]
    torch.testing.assert_close(*angles, rtol=1e-7, atol=1e-7)
    assert_agree(*found, F64)


def test_the_spectrum_of_a_data_set_is_that_of_the_cpu(device):
    ((x, y),) = seeded_batches(1, F64)
    found = [
        diagnostics.data_spectrum(
            small_classifier().to(place), cross_entropy, (x.to(place), y.to(place))
        ).eigenvalues
        for place in (device.name, "cpu")
    ]
    assert_agree(*found, F64)


@pytest.mark.parametrize("layout", ["global", "layerwise"])
def test_drift_over_steps_is_that_of_the_cpu(layout, device):
    found = []
    for place in (device.name, "cpu"):
        drift, angles = diagnostics.Drift(every=2), []
        model, optimizer, grad_filter = attached(place, F64, layout=layout)
        for batch in seeded_batches(6, F64):
            train(model, optimizer, [batch])
            angles.append(drift.observe(grad_filter.trackers))
        found.append([float(diagnostics.rms_sine(a)) for a in angles if a is not None])
    assert len(found[0]) == 2
    assert_agree(*found, F64)


@pytest.mark.parametrize("matrix", [Hessian, GaussNewton, Covariance])
def test_products_with_curvature_are_those_of_the_cpu(matrix, device, rng):
    ((x, y),) = seeded_batches(1, F64)
    v = torch.randn(195, generator=rng, dtype=F64)
    found = []
    for place in (device.name, "cpu"):
        model = small_classifier().to(place)
        A = matrix(model, cross_entropy, (x.to(place), y.to(place)))
        pairs = top_eigenpairs(A, 2, tolerance=1e-10, dtype=F64)
        assert pairs.vectors.device.type == place.partition(":")[0]
        projected = pairs.vectors @ (pairs.vectors.T @ v.to(place))
        found.append([A @ v.to(place), pairs.values, pairs.overlap(pairs.vectors)])
        # Vectors are as exact as the square root of what the values are asked for.
        found[-1].append(projected.cpu().round(decimals=4))
    assert_agree(*found, F64)


def test_samples_are_verified_on_the_device(device):
    ((x, y),) = seeded_batches(1, F64)
    model = small_classifier().to(device.name)
    report = dome.verify(model, cross_entropy, x.to(device.name), y.to(device.name))
    assert report.ok


def test_what_a_filter_says_is_recorded(device, tmp_path):
    model, optimizer, grad_filter = attached(device.name)
    with dome.Recorder(tmp_path / "run.csv") as recorder:
        for batch in seeded_batches(2):
            train(model, optimizer, [batch])
            recorder.record(grad_filter, loss=torch.ones((), device=device.name))
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert len(lines) == 3
