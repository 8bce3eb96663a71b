import pytest
import torch
import torch.nn.functional as F
from privacy.setting import CLIP, attach, flat_grad
from torch import nn
from torch.utils.data import TensorDataset

import dome
from dome.privacy import PrivacyError


class Matching(nn.Module):
    """Samples against descriptions of classes, through the same layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x, descriptions):
        return self.layer(x) @ self.layer(descriptions).T


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4, dtype=torch.float64)
        self.places = nn.Embedding(30, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, ids, position_ids):
        return self.head((self.words(ids) + self.places(position_ids)).tanh().mean(1))


def descriptions(num):
    rng = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(num + 1, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(num, (num + 1,), generator=rng)
    fixed = 3 * torch.randn(num, 5, generator=rng, dtype=torch.float64)
    return Matching, x, y, fixed


def positions(num):
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(9, (num + 1, num), generator=rng)
    return Positions, x, torch.randint(3, (num + 1,), generator=rng), torch.arange(num)


CASES = {"class descriptions": (descriptions, 200), "position ids": (positions, 30)}


def gradient(make, x, y, fixed, samples_in):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = attach(
        model, optimizer, rank=0, expected_batch_size=1.0, samples_in=samples_in
    )
    for inputs, targets in private.loader(TensorDataset(x, y)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, fixed), targets).backward()
        optimizer.step()
    return flat_grad(model)


@pytest.mark.parametrize(("case", "num"), CASES.values(), ids=CASES.keys())
def test_a_fixed_input_as_long_as_the_batch_does_not_break_clipping(case, num):
    make, x, y, fixed = case(num)
    name = "x" if make is Matching else "ids"
    more = gradient(make, x, y, fixed, (name,))
    less = gradient(make, x[:-1], y[:-1], fixed, (name,))
    assert 0.1 * CLIP < (more - less).norm() <= CLIP


@pytest.mark.parametrize(("case", "num"), CASES.values(), ids=CASES.keys())
def test_several_inputs_are_refused_before_anything_is_released(case, num):
    make, x, y, fixed = case(num)
    model = make()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, rank=0)
    for inputs, _ in private.loader(TensorDataset(x[:-1], y[:-1])):
        with pytest.raises(PrivacyError, match=r"several tensors.*samples_in=\("):
            model(inputs, fixed)
        with torch.no_grad():
            model(inputs, fixed)  # to look at, not to train on
        with pytest.raises(PrivacyError, match="backward"):
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert private.num_steps == 0


def test_names_of_inputs_are_checked_at_attach():
    model = Matching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="samples_in names 'y'"):
        attach(model, optimizer, samples_in=("y",))


def test_two_inputs_of_samples_are_declared():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(5, 3, dtype=torch.float64)
            self.right = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, left, right):
            return self.left(left) + self.right(right)

    def moved(count):
        torch.manual_seed(0)
        model = Both()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"rank": 0, "expected_batch_size": 1.0}
        private = attach(model, optimizer, samples_in=("left", "right"), **options)
        data = TensorDataset(x[:count], z[:count], y[:count])
        for left, right, targets in private.loader(data):
            F.cross_entropy(model(right=right, left=left), targets).backward()
            optimizer.step()
        return flat_grad(model)

    rng = torch.Generator().manual_seed(2)
    x, z = 5 * torch.randn(2, 12, 5, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=rng)
    assert 0.1 * CLIP < (moved(12) - moved(11)).norm() <= CLIP


def test_a_recorder_writes_what_costs_no_privacy():
    model = nn.Linear(5, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, rank=0)
    x = torch.randn(6, 5, dtype=torch.float64)
    records = []
    recorder = dome.Recorder(records.append)
    for inputs, targets in private.loader(TensorDataset(x, torch.arange(6) % 3)):
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        recorder.record(private, epsilon=private.epsilon(1e-5))
    (record,) = records
    record.pop("elapsed")  # seconds, which the recorder measures itself
    assert record == {
        "step": 1,
        "noise_multiplier": 1.0,
        "sample_rate": 1.0,
        "expected_batch_size": 6.0,
        "epsilon": private.epsilon(1e-5),
    }
