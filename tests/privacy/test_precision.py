import pytest
import torch
from models import small_classifier
from privacy.setting import CLIP, attach, flat_grad, samples, train
from torch import nn
from torch.utils.data import TensorDataset

from dome.privacy import PrivacyError
from dome.privacy.refuse import check_products
from dome.privacy.releases import clipped_sum_

SHORT = (torch.float16, torch.bfloat16)


def sgd(model, lr=0.1):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=lr)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_parameters_of_16_bits_are_refused(dtype):
    model = small_classifier(dtype)
    with pytest.raises(PrivacyError, match=rf"'0.weight' has 16 bits \({dtype}\)"):
        attach(model, sgd(model))


def test_frozen_layers_and_buffers_of_16_bits_are_refused():
    model = small_classifier(torch.float32)
    model[0].to(torch.bfloat16).requires_grad_(False)
    with pytest.raises(PrivacyError, match=r"'0.weight' has 16 bits"):
        attach(model, sgd(model))
    model = small_classifier(torch.float32)
    model.register_buffer("table", torch.zeros(3, dtype=torch.float16))
    with pytest.raises(PrivacyError, match=r"'table' has 16 bits"):
        attach(model, sgd(model))


def test_a_model_that_is_cast_later_is_refused():
    model = small_classifier(torch.float32)
    for p in model.parameters():
        nn.init.ones_(p)  # which 16 bits hold exactly
    optimizer = sgd(model)
    private = attach(model, optimizer)
    model.bfloat16()
    with pytest.raises(PrivacyError, match=r"'0.weight' has 16 bits"):
        train(model, optimizer, private, samples(6, torch.bfloat16))


def test_autocast_around_the_model_is_refused():
    model = small_classifier(torch.float32)
    optimizer = sgd(model)
    private = attach(model, optimizer)
    for x, _ in private.loader(TensorDataset(*samples(6, torch.float32))):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(PrivacyError, match="autocast is on"),
        ):
            model(x)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(x)  # to look at, not to train on


@pytest.mark.parametrize("how", ["autocast", "cast"])
def test_16_bits_inside_the_model_are_refused(how):
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_classifier(torch.float32)

        def forward(self, x):
            if how == "cast":
                return self.inner(x.half().float())
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    model = Short()
    optimizer = sgd(model)
    with pytest.raises(PrivacyError, match="the model computes in 16 bits"):
        train(model, optimizer, attach(model, optimizer), samples(6, torch.float32))


def test_in_32_bits_one_sample_more_moves_thousands_of_others_by_rounding_alone():
    def gradient(count):
        model = small_classifier(torch.float32)
        optimizer = sgd(model, lr=0.0)
        private = attach(model, optimizer, rank=0, expected_batch_size=1.0)
        train(model, optimizer, private, (x[:count], y[:count]))
        return flat_grad(model).double()

    x, y = samples(3000, torch.float32)
    change = (gradient(3000) - gradient(2999)).norm()
    # Means over 3,000 and 2,999 round differently in every row; 16 bits gave 4.3 C.
    assert 0.9 * CLIP < change < CLIP * (1 + 1e-3)


def medium():
    torch.set_float32_matmul_precision("medium")


def high():
    torch.set_float32_matmul_precision("high")


def short_products():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def short_convolutions():
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


def short_everything():
    torch.backends.fp32_precision = "tf32"


SETTINGS = [medium, high]
if hasattr(torch.backends, "fp32_precision"):
    SETTINGS += [short_products, short_convolutions, short_everything]


@pytest.fixture
def restored():
    backends = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)
    backends = (*backends, torch.backends) if len(SETTINGS) > 2 else ()
    before = [b.fp32_precision for b in backends]
    yield
    for backend, value in zip(backends, before, strict=True):
        backend.fp32_precision = value
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("when", ["forward", "backward", "step"])
@pytest.mark.parametrize("switch", SETTINGS)
def test_products_of_fewer_bits_are_refused_whenever_they_are_switched_on(switch, when):
    model = small_classifier(torch.float32)
    optimizer = sgd(model)
    private = attach(model, optimizer)

    def step(x, y, when=None):
        optimizer.zero_grad()
        switch() if when == "forward" else None
        loss = nn.functional.cross_entropy(model(x), y)
        switch() if when == "backward" else None
        loss.backward()
        switch() if when == "step" else None
        optimizer.step()

    loader = private.loader(TensorDataset(*samples(6, torch.float32)))
    for x, y in loader:
        step(x, y)
    before = [p.clone() for p in model.parameters()]
    for x, y in loader:
        with pytest.raises(PrivacyError, match=r"fewer than 24 bits.*Switch it off"):
            step(x, y, when)
    assert all(map(torch.equal, before, model.parameters()))


def test_the_settings_of_other_devices_do_not_matter():
    assert torch.backends.cudnn.allow_tf32
    check_products(torch.device("cpu"))


def test_convolutions_in_tf32_are_refused_on_cuda():
    with pytest.raises(PrivacyError, match=r"torch.backends.cud.*Switch it off"):
        check_products(torch.device("cuda"))


@pytest.mark.parametrize("where", ["backward", "step"])
def test_autocast_around_backward_or_step_is_refused(where):
    model = small_classifier(torch.float32)
    optimizer = sgd(model)
    private = attach(model, optimizer)
    for x, y in private.loader(TensorDataset(*samples(6, torch.float32))):
        loss = nn.functional.cross_entropy(model(x), y)
        autocast = torch.autocast("cpu", torch.bfloat16)
        if where == "backward":
            with autocast, pytest.raises(PrivacyError, match="autocast is on"):
                loss.backward()
        else:
            loss.backward()
            with autocast, pytest.raises(PrivacyError, match="autocast is on"):
                optimizer.step()


# How far rounding in float32 moves one of n rows when another joins: a few times
# 2⁻²⁴, in the same direction for all where samples are alike.
ROUNDING = 2.0**-22


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("count", [3000, 6000])
def test_a_sum_moves_by_no_more_than_the_sample_that_joins(count, alike):
    G = torch.randn(count, 67, generator=torch.Generator().manual_seed(1)) * 10
    if alike:
        G = G[:1].repeat(count, 1)
    change = clipped_sum_(G.clone(), CLIP) - clipped_sum_(G[:-1].clone(), CLIP)
    last = clipped_sum_(G[-1:].clone(), CLIP)
    # In float64: a float32 sum moved by 5e-4 C more where samples are alike.
    assert (change - last).norm() < count * 2.0**-50 * CLIP
    assert change.norm() < CLIP


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("count", [3000, 6000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_thousands_of_samples_move_by_rounding_as_derived(count, alike, reduction):
    def gradient(number):
        torch.manual_seed(0)
        model = small_classifier(torch.float32)
        optimizer = sgd(model, lr=0.0)
        options = {"rank": 0, "expected_batch_size": 1.0, "loss_reduction": reduction}
        private = attach(model, optimizer, **options)

        def loss_fn(out, y):
            return nn.functional.cross_entropy(out, y, reduction=reduction)

        train(model, optimizer, private, (x[:number], y[:number]), loss_fn=loss_fn)
        return flat_grad(model).double()

    x, y = samples(count, torch.float32)
    x = 10 * x
    if alike:
        x, y = x[:1].repeat(count, 1), y[:1].repeat(count)
    change = (gradient(count) - gradient(count - 1)).norm()
    # Gradients are released in float32, with noise of the same size as a sample.
    written = 2.0**-24 * (gradient(count).norm() + gradient(count - 1).norm())
    moved = count * ROUNDING * CLIP if reduction == "mean" else 0.0
    assert change < CLIP + moved + written
