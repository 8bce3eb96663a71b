from pathlib import Path

import pytest
import torch
from models import small_classifier
from reference import projector_distance
from safetensors.torch import load, save
from states.write import OPTIONS, train
from streams import decaying_stream

import dome
from dome.trackers import TRACKERS

WRITTEN_BY_0_1 = Path(__file__).parents[1] / "states"
every_tracker = pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())


@pytest.mark.parametrize("name", OPTIONS)
def test_states_of_version_0_1_are_read_and_go_on_as_they_did(name):
    saved = torch.load(WRITTEN_BY_0_1 / f"{name}.pt", weights_only=True)
    model = small_classifier()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, **OPTIONS[name])
    grad_filter.load_state_dict(saved["state"])
    assert grad_filter.stats.step == 12
    for block, tracker in grad_filter.trackers.items():
        assert projector_distance(saved["bases"][block], tracker.basis) < 1e-12
        assert tracker.num_updates == 12
    train(model, optimizer, saved["batches"])
    for entry, value in model.state_dict().items():
        torch.testing.assert_close(value, saved["end"][entry], atol=1e-12, rtol=1e-12)


def trained(make, rng, num=5, **options):
    tracker = make(700, 20, dtype=torch.float64, **options)
    for G in decaying_stream(rng, 700, 8, num):
        tracker.update(G)
    return tracker


@every_tracker
def test_later_updates_do_not_change_a_state(make, rng):
    tracker = trained(make, rng, oversample=2)
    state, U = tracker.state_dict(), tracker.basis.clone()
    copies = {name: value.clone() for name, value in state.items()}
    for G in decaying_stream(rng, 700, 8, 5):
        tracker.update(G)
    assert projector_distance(U, tracker.basis) > 1e-3
    assert all(torch.equal(state[name], copies[name]) for name in copies)
    tracker.load_state_dict(state)
    assert projector_distance(U, tracker.basis) < 1e-12


@every_tracker
@pytest.mark.parametrize("options", [{}, {"oversample": 3}, {"forget": 0.2}])
def test_a_state_goes_through_safetensors_bit_for_bit_after_any_update(
    make, options, rng
):
    batches = list(decaying_stream(rng, 400, 8, 8))
    for begin in range(1, 7):
        ahead, behind = (make(400, 5, dtype=torch.float64, **options) for _ in range(2))
        for G in batches[:begin]:
            ahead.update(G)
        behind.load_state_dict(load(save(ahead.state_dict())))
        for G in batches[begin:]:
            ahead.update(G)
            behind.update(G)
        again = behind.state_dict()
        for name, value in ahead.state_dict().items():
            assert torch.equal(again[name], value), (begin, name)


@every_tracker
@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        ("basis", lambda t: t * torch.nan, "not orthonormal"),
        ("basis", lambda t: t * 1.5, "not orthonormal"),
        ("num_updates", lambda t: t - 100, "'num_updates' in the state is negative"),
        ("num_skipped", lambda t: None, "no 'num_skipped'"),
        ("orthogonality_error", lambda t: t * torch.nan, "not finite"),
        ("seed", lambda t: t[None], "'seed' has shape"),
        ("seed", lambda t: t + 0.5, "'seed' in the state is stored as torch.float32"),
        (
            "num_updates",
            lambda t: "five",
            "'num_updates' in the state is stored as str",
        ),
        ("basis", lambda t: 0 * t, "not orthonormal"),
        ("Q", lambda t: t.half(), "the saved Q is stored as torch.float16"),
        ("Q", lambda t: "square", "no 'Q'"),
    ],
)
def test_what_cannot_be_a_state_is_refused_and_changes_nothing(
    make, entry, change, message, rng
):
    tracker = trained(make, rng)
    before = tracker.state_dict()
    state = trained(make, rng, num=3).state_dict()
    changed = change(state.pop(entry))
    state |= {} if changed is None else {entry: changed}
    with pytest.raises(ValueError, match=message):
        tracker.load_state_dict(state)
    after = tracker.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(("tracker", "entry"), [("power", "norms"), ("svd", "values")])
def test_negative_eigenvalues_are_refused(tracker, entry, rng):
    made = trained(TRACKERS[tracker], rng)
    state = made.state_dict()
    with pytest.raises(ValueError, match=f"{entry!r} in the state is negative"):
        made.load_state_dict(state | {entry: -state[entry]})


@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        ("leading", lambda t: 2 * t, "'leading' in the state is not orthonormal"),
        ("leading", lambda t: 0 * t, "'leading' in the state is not orthonormal"),
        ("arbitrary", lambda t: -t - 1, "'arbitrary' .* is not a Gram matrix"),
    ],
)
def test_what_an_oversampled_power_iteration_cannot_have_is_refused(
    entry, change, message, rng
):
    made = trained(TRACKERS["power"], rng, oversample=2)
    state = made.state_dict()
    with pytest.raises(ValueError, match=message):
        made.load_state_dict(state | {entry: change(state[entry])})


def test_a_direction_with_an_eigenvalue_must_be_there(rng):
    made = trained(TRACKERS["svd"], rng)
    state = made.state_dict() | {"Q": torch.empty(0, 20, dtype=torch.float64)}
    state["basis"] = made.basis.clone()
    made.load_state_dict(state)
    state["basis"][:, 3] = 0
    with pytest.raises(ValueError, match="not orthonormal"):
        made.load_state_dict(state)
