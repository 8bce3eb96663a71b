import pytest
import torch
from device.agreement import assert_agree
from device.training import flat, seeded_batches, train
from models import small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.continual import EWC

F64 = torch.float64


def moved(pairs, place):
    return [(x.to(place), y.to(place)) for x, y in pairs]


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_ewc_keeps_what_it_keeps_on_the_cpu(decay, device):
    found = []
    for place in (device.name, "cpu"):
        model = small_classifier().to(place)
        ewc = EWC(model, 3.0, decay=decay)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for task in range(2):
            train(model, optimizer, seeded_batches(2, F64))
            ewc.consolidate(cross_entropy, moved(seeded_batches(2 + task, F64), place))
        train(model, optimizer, seeded_batches(1, F64))
        found.append([ewc.penalty(), ewc.gradient(), ewc.fisher, ewc.anchor])
        assert ewc.gradient().device.type == place.partition(":")[0]
    assert_agree(*found, F64)


def test_ewc_behind_the_filter_and_labels_drawn_on_the_device(simulated):
    found = []
    for place in (simulated.name, "cpu"):
        model = small_classifier().to(place)
        ewc = EWC(model, 3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grad_filter = dome.attach(model, optimizer, 4, after=ewc)
        train(model, optimizer, seeded_batches(2, F64))
        ewc.consolidate(
            cross_entropy,
            moved(seeded_batches(2, F64), place),
            grad_filter=grad_filter,
            labels="model",
            generator=torch.Generator(place).manual_seed(3),
        )
        train(model, optimizer, seeded_batches(2, F64))
        state = {k: v.cpu() for k, v in ewc.state_dict().items()}
        again = EWC(model, 3.0)
        again.load_state_dict(state)
        found.append([flat(model), again.penalty()])
    assert_agree(*found, F64)


BASES = {
    "public": {"basis": "public", "loss_fn": cross_entropy},
    "released": {"basis": "released", "window": 3},
    "private": {"basis": "private"},
}


@pytest.mark.parametrize("options", BASES.values(), ids=BASES.keys())
def test_private_training_is_that_of_the_cpu_noise_included(options, device):
    # Noise and sampling come from the CPU whatever the device.
    check_privacy(options, device)


def test_private_training_with_a_basis_that_starts_at_random(simulated):
    check_privacy({"basis": "released", "window": 3, "tracker": "power"}, simulated)


def check_privacy(options, device):
    pytest.importorskip("opacus")
    found = []
    for place in (device.name, "cpu"):
        model = small_classifier().to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = dict(options)
        if options["basis"] == "public":
            chosen["public"] = moved(seeded_batches(2, F64), place)
        private = dome.privacy.attach(
            model,
            optimizer,
            2,
            max_grad_norm=0.5,
            noise_multiplier=1.0,
            sample_rate=0.5,
            generator=torch.Generator().manual_seed(5),
            **chosen,
        )
        ((x, y),) = seeded_batches(1, F64)
        for a, b in private.loader(torch.utils.data.TensorDataset(x, y)):
            optimizer.zero_grad()
            cross_entropy(model(a.to(place)), b.to(place)).backward()
            optimizer.step()
        found.append([flat(model), private.epsilon(1e-5)])
    assert_agree(*found, F64)
