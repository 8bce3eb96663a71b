import pytest
import torch
import torch.nn.functional as F
from samples.loop import per_sample_loop, sum_loss, tensors_in
from samples.models import built
from samples.rules.cases_indexing import GROUPED
from samples.rules.cases_layers import LAYERS
from samples.rules.cases_parameters import PARAMETERS
from samples.rules.cases_sequences import SEQUENCES
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

ALL = {**LAYERS, **SEQUENCES, **PARAMETERS, **GROUPED}
# One for every kernel that computes in a precision of its own; test_contract has all.
CHOSEN = (
    *(
        "linear",
        "linear on sequences",
        "bilinear",
        "prelu",
        "matmul",
        "addmm",
        "einsum",
    ),
    *("conv1d", "conv2d", "conv2d of many channels", "conv2d in groups", "einsum"),
    *("conv2d reflecting", "conv3d", "conv_transpose2d"),
    *("group norm", "layer norm", "rms norm", "instance norm"),
    *("batch norm in evaluation mode", "embedding", "embedding with max norm"),
    *("bag mean", "bag max", "weighted bag", "rnn", "gru", "lstm", "gru cell"),
    *("lstm with projection", "gru with a learned start", "lstm cell", "attention"),
    *("attention with a mask", "attention to others", "transformer"),
    *("scale and shift", "matmul of stacks", "relative attention", "stacked"),
    *("merged lora", "weight norm", "spectral norm", "orthogonal", "tied embedding"),
    *("distances to learned centres", "in-place operations on sequences", *GROUPED),
)
CASES = {name: ALL[name] for name in CHOSEN}
# Plain autocast has no kernels for these on CPU: a QR and a distance in bfloat16.
NO_AUTOCAST = {"orthogonal", *GROUPED}


def captured(model, inputs, dtype):
    source = PerSample(model, Layout(model))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        output = model(*inputs)
    sum_loss(output).backward()
    rows = source.take()
    source.detach()
    return output, rows


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", CASES)
def test_float32_rows_are_those_of_the_loop(name):
    _, model, inputs = built(CASES[name])
    _, rows = captured(model, inputs, torch.float32)
    # Sums of at most a few hundred products, in another order than the loop's.
    assert_close(rows, per_sample_loop(model, inputs), rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", sorted(CASES.keys() - NO_AUTOCAST))
def test_autocast_output_is_plain_autocasts_and_rows_are_float32(name):
    plain, model, inputs = built(CASES[name])
    try:
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(*inputs)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip("torch itself has no bfloat16 kernel for this on this CPU")
    sum_loss(expected).backward()
    output, rows = captured(model, inputs, torch.bfloat16)
    pairs = list(zip(tensors_in(output), tensors_in(expected), strict=True))
    assert [a.dtype for a, _ in pairs] == [b.dtype for _, b in pairs]
    assert rows.dtype == torch.float32
    # bfloat16 keeps 8 bits: a few roundings of a unit value are a few per cent.
    for a, b in pairs:
        assert_close(a, b, rtol=0.05, atol=0.05)
    total, exact = Layout(model).gather(), Layout(plain).gather()
    assert (rows.sum(0) - total).norm() <= 0.02 * total.norm()
    assert (total - exact).norm() <= 0.05 * exact.norm()
    with torch.autocast("cpu", torch.bfloat16):
        loop = per_sample_loop(model, inputs)
    assert (rows - loop).norm() <= 0.05 * loop.norm()


def test_backward_inside_autocast_is_no_different():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    _, outside = captured(model, [x], torch.bfloat16)
    outside = outside.clone()
    source = PerSample(model, Layout(model))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        sum_loss(model(x)).backward()
    assert_close(source.take(), outside)


def test_scaled_losses_scale_the_rows_with_the_gradient():
    torch.manual_seed(0)
    model, x, y = (
        nn.Linear(4, 3).double(),
        torch.randn(5, 4).double(),
        torch.arange(5) % 3,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    source = PerSample(model, Layout(model))
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    rows = source.take()
    assert_close(rows.sum(0), Layout(model).gather())
    scaler.unscale_(optimizer)
    assert_close(rows.sum(0) / 1024, Layout(model).gather())


def test_step_skipped_by_the_scaler_leaves_no_rows_to_the_next():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    source = PerSample(model, Layout(model))
    for scale in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(source.take()) == 5


def test_bfloat16_model_has_bfloat16_rows():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    source = PerSample(model, Layout(model))
    model(torch.randn(5, 4, dtype=torch.bfloat16)).sum().backward()
    assert source.take().dtype == torch.bfloat16
