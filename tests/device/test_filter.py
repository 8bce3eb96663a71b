import pytest
import torch
from device.agreement import assert_agree
from device.training import attached, flat, outcome, seeded_batches, train

from dome.compression import ErrorFeedback, HadamardSketch, TopK

OPTIONS = {
    "power": {},
    "svd": {"tracker": "svd"},
    "layer-wise": {"layout": "layerwise"},
    "layer-wise svd": {"layout": "layerwise", "tracker": "svd"},
    "ranks by layer": {"layout": "layerwise", "rank": {"0": 3, "2": 2}},
    "oversampled": {"oversample": 4},
    "forgetting": {"forget": 0.3},
    "now and then": {"update_every": 2},
    "half, later": {"strength": 0.5, "warmup": 2},
    "sum": {"loss_reduction": "sum"},
    "stream": {"stream": True, "layout": "layerwise"},
    "float64": {"dtype": torch.float64},
    "float64 svd": {"dtype": torch.float64, "tracker": "svd"},
    "float64 layer-wise": {"dtype": torch.float64, "layout": "layerwise"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_training_on_a_device_leads_where_it_leads_on_the_cpu(options, device):
    dtype = options.get("dtype", torch.float32)
    found = []
    for place in (device.name, "cpu"):
        model, optimizer, grad_filter = attached(place, **options)
        train(model, optimizer, seeded_batches(dtype=dtype))
        found.append(outcome(model, grad_filter))
    assert_agree(*found, dtype)


@pytest.mark.parametrize("tracker", ["power", "svd"])
def test_a_basis_of_16_bits_is_kept_and_used_on_the_device(tracker, device):
    found = []
    for place in (device.name, "cpu"):
        options = {"tracker": tracker, "basis_dtype": torch.bfloat16}
        model, optimizer, grad_filter = attached(place, **options)
        train(model, optimizer, seeded_batches())
        assert grad_filter.trackers["all"].basis.dtype == torch.bfloat16
        found.append(flat(model).cpu())
    # An entry that is rounded the other way moves its direction by 2^-9.
    torch.testing.assert_close(*found, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("tracker", ["power", "svd"])
def test_micro_batches_are_samples_on_a_device_too(tracker, device):
    found = []
    for place in (device.name, "cpu"):
        options = {"samples": "microbatch", "rank": 2, "tracker": tracker}
        model, optimizer, grad_filter = attached(place, torch.float64, **options)
        train(model, optimizer, seeded_batches(dtype=torch.float64), parts=4)
        found.append(outcome(model, grad_filter))
    assert_agree(*found, torch.float64)


def test_accumulated_samples_are_those_of_the_cpu(device):
    found = []
    for place in (device.name, "cpu"):
        model, optimizer, grad_filter = attached(place, torch.float64)
        train(model, optimizer, seeded_batches(dtype=torch.float64), parts=3)
        found.append(outcome(model, grad_filter))
    assert_agree(*found, torch.float64)


@pytest.mark.parametrize(
    "after",
    [
        lambda: TopK(4.0),
        lambda: ErrorFeedback(HadamardSketch(4.0)),
        lambda: [TopK(2.0), lambda g: g * (1 / g.norm()).clamp(max=1.0)],
    ],
    ids=["topk", "hadamard with feedback", "topk and a clip"],
)
def test_what_comes_after_the_filter_stays_on_its_device(after, device):
    found = []
    for place in (device.name, "cpu"):
        model, optimizer, grad_filter = attached(place, torch.float64, after=after())
        train(model, optimizer, seeded_batches(dtype=torch.float64))
        found.append(outcome(model, grad_filter))
    # Hadamard messages carry float32.
    assert_agree(*found, torch.float32)


@pytest.mark.parametrize("layout", ["global", "layerwise"])
@pytest.mark.parametrize("tracker", ["power", "svd"])
def test_a_run_goes_from_device_to_cpu_through_its_state(tracker, layout, device):
    options = {"tracker": tracker, "layout": layout, "dtype": torch.float64}
    data = seeded_batches(6, torch.float64)
    model, optimizer, grad_filter = attached(device.name, **options)
    train(model, optimizer, data[:3])
    here, here_optimizer, here_filter = attached("cpu", **options)
    here.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    momentum = {k: v.cpu() for k, v in optimizer_state(optimizer).items()}
    load_optimizer(here_optimizer, momentum)
    here_filter.load_state_dict(
        {k: v.cpu() for k, v in grad_filter.state_dict().items()}
    )
    grad_filter.load_state_dict(grad_filter.state_dict())  # averages begin anew
    train(model, optimizer, data[3:])
    train(here, here_optimizer, data[3:])
    assert_agree(outcome(model, grad_filter), outcome(here, here_filter), torch.float64)


def optimizer_state(optimizer):
    states = optimizer.state_dict()["state"]
    return {i: s["momentum_buffer"] for i, s in states.items()}


def load_optimizer(optimizer, momentum):
    state = optimizer.state_dict()
    state["state"] = {i: {"momentum_buffer": m} for i, m in momentum.items()}
    optimizer.load_state_dict(state)


def test_a_gradient_that_is_not_finite_is_left_where_it_is(device):
    model, optimizer, grad_filter = attached(device.name)
    train(model, optimizer, seeded_batches(2))
    ((x, y),) = seeded_batches(1)
    x[0, 0] = float("inf")
    before = flat(model).cpu()
    with pytest.warns(RuntimeWarning, match="not finite"):
        train(model, optimizer, [(x, y)])
    assert grad_filter.stats.skipped_updates == 1
    assert not torch.equal(flat(model).cpu(), before)


def test_samples_of_ones_own_and_filtering_by_hand(device, rng):
    G = torch.randn(12, 195, generator=rng, dtype=torch.float64)
    found = []
    for place in (device.name, "cpu"):
        model, _, grad_filter = attached(place, torch.float64)
        grad_filter.observe(G.to(place))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        grad_filter.filter_()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append([gradient, grad_filter.project_out(G.to(place))])
    assert_agree(*found, torch.float64)
