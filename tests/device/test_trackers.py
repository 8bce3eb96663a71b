import pytest
import torch
from device.agreement import assert_agree
from streams import decaying_stream

import dome

TRACKERS = {"power": dome.StreamingPower, "svd": dome.IncrementalSVD}
every_tracker = pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())

OPTIONS = {
    "plain": {},
    "float64": {"dtype": torch.float64},
    "16 bits": {"dtype": torch.bfloat16},
    "oversampled": {"oversample": 4},
    "forgetting": {"forget": 0.2},
}
DIM, RANK, SAMPLES = 120, 6, 16  # as many samples as make every direction theirs


def seen(tracker, gradient):
    """What a tracker says, free of the signs and rotations of its basis."""
    update = tracker.last_update
    return {
        "left": tracker.project_out(gradient),
        "half left": tracker.project_out(gradient, strength=0.5),
        "eigenvalues": tracker.eigenvalues,
        "effective rank": float(tracker.effective_rank),
        "error": float(tracker.orthogonality_error) < 1e-2,
        "captured": update.captured,
        "total": update.total,
        "drift": update.drift,
        "skipped": tracker.num_skipped,
    }


def followed(make, place, stream, **options):
    tracker = make(DIM, RANK, device=place, **options)
    if "generator" not in options:
        # Generators of other kinds of devices draw other numbers to start from.
        tracker.load_state_dict(make(DIM, RANK, **options).state_dict())
    for G in stream:
        tracker.update(G.to(place), scale=0.5)
    return tracker


def stream_of(rng, dtype, num_samples=SAMPLES, num_batches=6):
    # Distinct eigenvalues: a pair of equal ones would leave their order to rounding.
    return list(decaying_stream(rng, DIM, num_samples, num_batches, 1.0, dtype))


@every_tracker
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_tracker_sees_on_a_device_what_it_sees_on_the_cpu(make, options, device, rng):
    small = options.get("dtype") == torch.bfloat16
    dtype = torch.float64 if options.get("dtype") == torch.float64 else torch.float32
    stream = stream_of(rng, dtype)
    g = torch.randn(DIM, generator=rng, dtype=dtype)
    here = followed(make, "cpu", stream, **options)
    there = followed(make, device.name, stream, **options)
    assert there.basis.device == torch.zeros(0, device=device.name).device
    found = seen(there, g.to(device.name)), seen(here, g)
    if not small:
        assert_agree(*found, dtype)
        return
    # An entry of bfloat16 that is rounded the other way moves its direction by 2^-9.
    left_there, left_here = (f["left"].cpu() for f in found)
    torch.testing.assert_close(left_there, left_here, rtol=0.02, atol=0.02)


@every_tracker
@pytest.mark.parametrize("num_samples", [3, 40], ids=["B<k", "B>k"])
def test_directions_that_are_made_up_come_from_a_generator_on_the_device(
    make, num_samples, simulated, rng
):
    stream = stream_of(rng, torch.float64, num_samples, num_batches=4)
    g = torch.randn(DIM, generator=rng, dtype=torch.float64)
    here = followed(
        make, "cpu", stream, dtype=torch.float64, generator=rng.clone_state()
    )
    mine = torch.Generator(simulated.name)
    mine.set_state(rng.get_state())
    there = followed(make, simulated.name, stream, dtype=torch.float64, generator=mine)
    assert_agree(seen(there, g.to(simulated.name)), seen(here, g), torch.float64)


@every_tracker
def test_a_generator_of_another_device_is_refused_or_used_but_never_mixed(
    make, simulated, rng
):
    stream = stream_of(rng, torch.float32, 3, num_batches=2)
    try:
        tracker = followed(make, simulated.name, stream, generator=rng)
    except (RuntimeError, ValueError) as error:
        assert "generator" in str(error)  # noqa: PT017 (either is right)
    else:
        assert tracker.basis.device.type == "sim"


@every_tracker
def test_a_sample_that_is_not_finite_is_left_out_on_a_device_too(make, device, rng):
    tracker = followed(make, device.name, stream_of(rng, torch.float32))
    before = tracker.basis.cpu().clone()
    bad = torch.randn(SAMPLES, DIM, generator=rng)
    bad[2, 5] = float("nan")
    with pytest.warns(RuntimeWarning, match="not finite"):
        tracker.update(bad.to(device.name))
    assert tracker.num_skipped == 1
    assert torch.equal(tracker.basis.cpu(), before)


@every_tracker
def test_degenerate_batches_are_the_same_on_a_device(make, device, rng):
    G = torch.randn(SAMPLES, DIM, generator=rng, dtype=torch.float64)
    stream = [G, G[:1].expand(SAMPLES, -1).clone(), 0 * G, 1e-12 * G, G]
    g = torch.randn(DIM, generator=rng, dtype=torch.float64)
    here = followed(make, "cpu", stream, dtype=torch.float64)
    there = followed(make, device.name, stream, dtype=torch.float64)
    assert_agree(seen(there, g.to(device.name)), seen(here, g), torch.float64)


@every_tracker
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_from_the_cpu_to_a_device_and_back(make, dtype, device, rng):
    stream = stream_of(rng, torch.float32)
    here = followed(make, "cpu", stream[:3], dtype=dtype)
    there = make(DIM, RANK, dtype=dtype, device=device.name)
    there.load_state_dict(here.state_dict())
    assert there.basis.device.type != "cpu"
    assert torch.equal(there.basis.cpu(), here.basis)
    back = make(DIM, RANK, dtype=dtype)
    back.load_state_dict({k: v.cpu() for k, v in there.state_dict().items()})
    for G in stream[3:]:
        here.update(G)
        back.update(G)
    assert torch.equal(back.basis, here.basis)


@every_tracker
def test_a_run_on_a_device_resumes_bit_for_bit(make, device, rng):
    stream = [G.to(device.name) for G in stream_of(rng, torch.float32)]
    straight = followed(make, device.name, stream[:3])
    saved = {k: v.clone() for k, v in straight.state_dict().items()}
    resumed = make(DIM, RANK, device=device.name)
    resumed.load_state_dict(saved)
    for G in stream[3:]:
        straight.update(G)
        resumed.update(G)
    assert torch.equal(straight.basis.cpu(), resumed.basis.cpu())
    assert torch.equal(straight.eigenvalues.cpu(), resumed.eigenvalues.cpu())
