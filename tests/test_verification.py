import pytest
import torch
from models import batches, small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome


def test_a_model_with_dropout_agrees_and_keeps_its_mode_and_gradients(rng):
    model = nn.Sequential(small_classifier(), nn.Dropout(0.5)).train()
    (x, y), *_ = batches(rng, 1)
    report = dome.verify(model, cross_entropy, x, y)
    assert report.ok
    assert "4 parameters, 12 samples: captured gradients agree" in str(report)
    assert model[1].training
    assert all(p.grad is None for p in model.parameters())


def test_the_parameter_that_differs_is_named(rng, monkeypatch):
    model = small_classifier()
    (x, y), *_ = batches(rng, 1)
    right = dome.per_sample_gradients(model, cross_entropy, x, y)
    wrong = right.clone()
    wrong[3, 150] *= 2  # a weight of the second layer
    monkeypatch.setattr("dome.verification.sample_shares", lambda *_: wrong / len(x))
    report = dome.verify(model, cross_entropy, x, y)
    assert not report.ok
    assert [e.name for e in report.wrong] == ["2.weight"]
    assert "2.weight" in str(report)
    assert 'samples="microbatch"' in str(report)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_zero_but_for_rounding_is_not_called_wrong(rng, dtype):
    torch.manual_seed(0)
    layers = nn.Conv1d(4, 6, 3), nn.GroupNorm(6, 6), nn.Tanh()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(30, 3)).to(dtype)
    x = torch.randn(5, 4, 7, generator=rng, dtype=torch.float64).to(dtype)
    y = torch.arange(5) % 3
    rows = dome.per_sample_gradients(model, cross_entropy, x, y)
    bias = rows[:, 72:78]  # the normalisation takes it away again
    assert 0 < bias.abs().max() < 1e-6 * rows.abs().max()
    report = dome.verify(model, cross_entropy, x, y)
    assert report.ok, report


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(8, 3), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return self.large(x) + self.small(1e-5 * x)


def test_a_gradient_that_is_small_and_wrong_is_found(rng, monkeypatch):
    model, ((x, y), *_) = Small().double(), batches(rng, 1)
    wrong = dome.per_sample_gradients(model, cross_entropy, x, y)
    wrong[:, 27:] *= 1.001
    monkeypatch.setattr("dome.verification.sample_shares", lambda *_: wrong / len(x))
    report = dome.verify(model, cross_entropy, x, y)
    assert [e.name for e in report.wrong] == ["small.weight"]


def test_samples_that_see_each_other_are_found(rng):
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x):
            z = self.linear(x)
            return z - z.mean(dim=0)  # every prediction depends on the whole batch

    report = dome.verify(Mixes().double(), cross_entropy, *next(batches(rng, 1)))
    assert not report.ok


def test_verify_works_while_a_filter_is_attached(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=3)
    (x, y), *_ = batches(rng, 1)
    assert dome.verify(model, cross_entropy, x, y).ok
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert grad_filter.stats.step == 1
    assert grad_filter.stats.skipped_updates == 0


def test_batch_norm_in_training_mode_is_refused_by_name(rng):
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match="layer '1' is batch norm in training mode"):
        dome.verify(model, cross_entropy, *next(batches(rng, 1)))


LOSSES = {
    "sum": lambda z, y: cross_entropy(z, y, reduction="sum"),
    "ignored": lambda z, y: cross_entropy(z, y, ignore_index=0),
    "weighted": lambda z, y: cross_entropy(
        z, y, weight=torch.arange(1.0, z.shape[1] + 1, dtype=z.dtype)
    ),
    "coupled": lambda z, y: cross_entropy(z - z.mean(0), y),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_that_weighs_or_couples_samples_agrees(rng, loss_fn):
    model = small_classifier()
    (x, y), *_ = batches(rng, 1)
    report = dome.verify(model, loss_fn, x, y)
    assert report.ok, report


def test_shares_sum_to_the_gradient_whatever_the_reduction(rng):
    model = small_classifier()
    (x, y), *_ = batches(rng, 1)
    loss_fn = LOSSES["sum"]
    G = dome.per_sample_gradients(model, loss_fn, x, y, loss_reduction="sum")
    loss_fn(model(x), y).backward()
    total = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(G.sum(0), total)
    with pytest.raises(ValueError, match="loss_reduction must be one of"):
        dome.per_sample_gradients(model, loss_fn, x, y, loss_reduction="none")


class Returns(nn.Module):
    def __init__(self, wrap=lambda loss, z: {"loss": loss, "logits": z}):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 5)
        self.wrap = wrap

    def forward(self, words, labels=None, *, scale=1.0):
        z = scale * self.head(self.table(words))
        if labels is None:
            return {"logits": z}
        loss = cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return self.wrap(loss, z)


def sentences(rng):
    labels = torch.randint(5, (4, 6), generator=rng)
    labels[1, 3:], labels[2, 1:] = -100, -100
    return {"words": torch.randint(9, (4, 6), generator=rng), "labels": labels}


@pytest.mark.parametrize(
    "wrap",
    [lambda loss, z: {"loss": loss, "logits": z}, lambda loss, z: (loss, z)],
    ids=["dictionary", "tuple"],
)
def test_a_model_that_returns_its_loss_takes_a_dictionary(rng, wrap):
    report = dome.verify(Returns(wrap).double(), None, sentences(rng))
    assert report.ok, report
    assert report.num_samples == 4
    assert report.errors[-1].name == "(the loss itself)"


def test_a_sample_of_which_all_is_ignored_has_no_share(rng):
    batch = sentences(rng)
    batch["labels"][0] = -100
    report = dome.verify(Returns().double(), None, batch)
    assert report.ok, report


def test_a_model_takes_inputs_by_name_and_a_loss_of_results_alone(rng):
    model, batch = Returns().double(), sentences(rng)

    def loss_fn(output):
        z = output["logits"].flatten(0, 1)
        return cross_entropy(z, batch["labels"].flatten(), ignore_index=-100)

    report = dome.verify(model, loss_fn, (batch["words"],), scale=0.5)
    assert report.ok, report


def test_a_returned_loss_that_samples_do_not_add_up_to_is_found(rng):
    class Bent(Returns):
        def forward(self, words, labels):
            loss = super().forward(words, labels)["loss"]
            return loss + loss.square()

    report = dome.verify(Bent().double(), None, sentences(rng))
    assert "(the loss itself)" in [e.name for e in report.wrong]


def test_a_model_without_a_loss_is_named(rng):
    with pytest.raises(ValueError, match="dict without a scalar loss"):
        dome.verify(Returns().double(), None, {"words": sentences(rng)["words"]})


class Lists(nn.Linear):
    def forward(self, x):
        z = super().forward(x)
        return {"parts": [z[k] for k in range(len(z))], "logits": z}


def test_results_that_the_loss_does_not_read_may_be_a_list_of_samples(rng):
    model, ((x, y), *_) = Lists(8, 3).double(), batches(rng, 1)
    report = dome.verify(model, lambda out: cross_entropy(out["logits"], y), {"x": x})
    assert report.ok, report
    with pytest.raises(ValueError, match=r"result\['parts'\]\[0\] of shape \(3,\) is"):
        dome.verify(model, lambda out: sum(z.sum() for z in out["parts"]), {"x": x})


def test_results_that_hold_no_samples_are_named(rng):
    model = nn.Sequential(nn.Linear(8, 3), nn.Flatten(0)).double()
    (x, y), *_ = batches(rng, 1)
    with pytest.raises(ValueError, match=r"shape \(36,\) is \(3,\) for one sample"):
        dome.verify(model, lambda z, y: z.sum(), x, y)
    with pytest.raises(ValueError, match="no tensor whose first dimension"):
        dome.verify(model, None, {"scale": 2.0})


def test_inputs_without_samples_are_declared():
    class Operator(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.trunk = nn.Linear(5, 4), nn.Linear(2, 4)

        def forward(self, u, grid):
            return self.branch(u) @ self.trunk(grid).tanh().T

    model, inputs = Operator(), (torch.randn(6, 5), torch.randn(6, 2))

    def loss(out):
        return out.square().mean()

    with pytest.raises(RuntimeError, match=r"'grid'.*samples_in"):
        dome.verify(model, loss, inputs)
    assert dome.verify(model, loss, inputs, samples_in="u").ok
    with pytest.raises(ValueError, match="samples_in names 'x'"):
        dome.verify(model, loss, inputs, samples_in="x")


def test_products_of_eight_bits_are_compared_by_their_own_rounding():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        report = dome.verify(
            model, nn.functional.mse_loss, torch.randn(64, 64), torch.randn(64, 64)
        )
    finally:
        torch.set_float32_matmul_precision(before)
    assert report.ok
    assert report.tolerance < 0.1
