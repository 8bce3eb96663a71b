import random
from collections import UserDict

import pytest
import torch
from privacy.setting import attach
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import TensorDataset

from dome.privacy import PrivacyError


class Before(nn.Module):
    """A classifier behind a function of the batch (B, 8)."""

    def __init__(self, function, p=0.0):
        super().__init__()
        self.function = function
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 6), nn.Dropout(p), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(self.function(x))


class After(Before):
    def forward(self, x):
        return self.function(self.net(x))


class WithLoss(Before):
    """Computes its loss itself, as many language models do."""

    def forward(self, x):
        out = self.net(x)
        return {"loss": self.function(out), "logits": out.detach()}


def samples(count=6, dtype=torch.float32):
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(count, 8, generator=rng, dtype=dtype)
    return x, torch.randint(3, (count,), generator=rng)


def one_step(model, loss=cross_entropy, data=None, **options):
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, **options)
    for x, y in private.loader(TensorDataset(*(data or samples(dtype=dtype)))):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return private


def shuffled(x):
    return x[torch.randperm(len(x))]


def centred_if_large(x):
    # No sample of these is as large: no test by numbers can see it.
    return x - x.mean(0) * (x.abs().max() - 100).relu()


@pytest.mark.parametrize("place", [Before, After])
@pytest.mark.parametrize("mix", [shuffled, centred_if_large])
def test_a_mix_that_numbers_do_not_show_is_refused(mix, place):
    with pytest.raises(PrivacyError, match=r"mixes samples by .*detach\(\)"):
        one_step(place(mix))


def test_a_mix_that_comes_late_is_refused():
    late = []
    model = Before(lambda x: x - x.mean(0) if late else x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, sample_rate=0.1)
    for step, (x, y) in enumerate(private.loader(TensorDataset(*samples(40)))):
        if step == 5:
            late.append(True)
            with pytest.raises(PrivacyError, match="mixes samples by 'mean' over"):
                model(x)
            break
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert private.num_steps == 5


def attend(x):
    return torch.softmax(x @ x.T, dim=1) @ x


MIXING = {
    "centred": lambda x: x - x.mean(dim=0),
    "a little centred": lambda x: x - 1e-2 * x.mean(dim=0),
    "scaled by the largest": lambda x: x / x.abs().max(),
    "its neighbour": lambda x: x - x.roll(1, dims=0),
    "attention over the batch": attend,
    "sorted": lambda x: x.sort(dim=0).values,
    "their number": lambda x: x / len(x),
}


MIXED = "mixes samples|cannot tell the 6 samples|samples that were mixed"


@pytest.mark.parametrize("place", [Before, After])
@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING.keys())
def test_a_model_that_mixes_samples_is_refused_at_the_first_step(mix, place):
    # Some are lost sight of already where samples are captured.
    with pytest.raises(RuntimeError, match=MIXED):
        one_step(place(mix))


@pytest.mark.parametrize("mix", [MIXING["centred"], MIXING["their number"]])
def test_dropout_does_not_hide_that_samples_are_mixed(mix):
    with pytest.raises(PrivacyError, match="the model mixes samples"):
        one_step(Before(mix, p=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 3, 40])
def test_two_samples_are_enough_to_see_it(count, dtype):
    model = Before(MIXING["centred"]).to(dtype)
    with pytest.raises(PrivacyError, match="the model mixes samples"):
        one_step(model, data=samples(count, dtype))


def test_a_single_sample_is_not_mixed_and_the_next_batch_is_tested():
    model = Before(lambda x: x - x.mean(dim=0) if len(x) > 1 else x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, sample_rate=0.1, expected_batch_size=1.0)
    sizes = []

    def go_on():
        for x, y in private.loader(dataset):
            sizes.append(len(x))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    dataset = data()
    with pytest.raises(PrivacyError, match="the model mixes samples"):
        go_on()
    assert max(sizes[:-1]) == 1
    assert sizes[-1] > 1


def beside_torch(x):
    return x - float(x.mean())


def test_mixing_that_one_batch_does_not_show_is_seen_in_the_next():
    def mix(x):
        return beside_torch(x) if private.num_steps else x

    model = Before(mix)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    for x, y in private.loader(data()):
        cross_entropy(model(x), y).backward()
        optimizer.step()
    for x, y in private.loader(private._loader.dataset):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with pytest.raises(PrivacyError, match="the model mixes samples"):
            optimizer.step()


def data():
    return TensorDataset(*samples(4))


def test_a_mode_that_was_not_tested_is_tested():
    class Switch(Before):
        def forward(self, x):
            return self.net(x if self.training else self.function(x))

    model = Switch(beside_torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    for mode in (True, True, False):
        model.train(mode)
        for x, y in private.loader(
            private._loader.dataset if private._loader else data()
        ):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if mode:
                optimizer.step()
            else:
                with pytest.raises(PrivacyError, match="the model mixes samples"):
                    optimizer.step()


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: (out - out.mean(dim=0)).square().mean(),
        lambda out: (out * out.detach().sum().sigmoid()).mean(),
        lambda out: out[out > 0].mean(),  # over as many as there are: tokens, say
    ],
)
def test_a_loss_inside_the_model_that_mixes_samples_is_refused(loss):
    with pytest.raises(PrivacyError, match="the model mixes samples"):
        one_step(WithLoss(loss), lambda out, _: out["loss"])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_inside_the_model_may_sum_up_samples(reduction):
    def loss(out):
        terms = out.square().sum(dim=1)
        return terms.mean() if reduction == "mean" else terms.sum()

    model = WithLoss(loss, p=0.3)
    one_step(model, lambda out, _: out["loss"], loss_reduction=reduction)


def test_what_the_loss_does_not_use_may_be_of_all_samples():
    class Chatty(Before):
        def forward(self, x):
            out = self.net(x)
            return out, out.detach().mean(dim=0).var()

    one_step(Chatty(None), lambda out, y: cross_entropy(out[0], y))


def noisy(x):
    return x + torch.randn_like(x) * random.random()


INDEPENDENT = {
    "plain": lambda: Before(nn.Identity()),
    "dropout": lambda: Before(nn.Dropout(0.3), p=0.5),
    "dropout in evaluation too": lambda: Before(lambda x: dropout(x, 0.4)),
    "noise of its own": lambda: Before(noisy),
    "in place": lambda: Before(nn.ReLU(inplace=True)),
    "norms": lambda: Before(nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 8))),
    "recurrent": lambda: Before(Column(nn.GRU(1, 1, batch_first=True))),
    "attention over a sample": lambda: Before(Heads()),
    "spectral norm": lambda: Before(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
}


class Column(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x[:, :, None])[0][:, :, 0]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        x = x.view(len(x), 2, 4)
        return self.inner(x, x, x)[0].flatten(1)


@pytest.mark.parametrize("make", INDEPENDENT.values(), ids=INDEPENDENT.keys())
@pytest.mark.parametrize("training", [True, False])
def test_models_that_keep_samples_apart_are_trained(make, training):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        private = one_step(make().train(training))
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
    assert private.num_steps == 1


def test_the_test_leaves_seeds_buffers_and_gradients_alone():
    class Counting(Before):
        def __init__(self):
            super().__init__(nn.Identity())
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Counting()
    before = torch.get_rng_state(), random.getstate()
    one_step(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert model.calls == 1


def test_a_buffer_that_keeps_something_of_samples_is_refused():
    class Running(Before):
        def __init__(self):
            super().__init__(nn.Identity())
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(dim=0), 0.1)
            return super().forward(x)

    with pytest.raises(PrivacyError, match="buffer 'mean' keeps something"):
        one_step(Running())


def test_a_model_that_cannot_be_repeated_is_refused():
    rng = torch.Generator()

    def noise(x):
        return x + torch.randn(x.shape, generator=rng)

    with pytest.raises(PrivacyError, match="other gradients for the same samples"):
        one_step(Before(noise))


def test_a_sample_that_is_not_finite_does_not_look_like_mixing():
    x, y = samples()
    x[1] = torch.nan
    one_step(Before(nn.Identity()), data=(x, y))
    with pytest.raises(PrivacyError, match="the model mixes samples"):
        one_step(Before(MIXING["centred"]), data=(x, y))


def test_bags_and_time_first_batches_are_taken_apart():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

        def forward(self, indices, offsets):
            return self.out(self.bag(indices, offsets))

    def collate(batch):
        items = [torch.arange(i % 3 + 1) + i % 5 for i, _ in batch]
        starts = torch.tensor([0] + [len(i) for i in items[:-1]]).cumsum(0)
        return torch.cat(items), starts, torch.stack([y for _, y in batch])

    model = Bags()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    labels = samples()[1]
    for indices, offsets, y in private.loader(
        [(i, y) for i, y in enumerate(labels)], collate_fn=collate
    ):
        cross_entropy(model(indices, offsets), y).backward()
        optimizer.step()
    assert private.num_steps == 1

    rnn = nn.RNN(1, 3)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
    private = attach(rnn, optimizer, batch_dim=1)
    for x, y in private.loader(data()):
        cross_entropy(rnn(x.T[:, :, None])[0][-1], y).backward()
        optimizer.step()
    assert private.num_steps == 1


def test_inputs_in_objects_of_their_own_are_refused():
    class Model(Before):
        def forward(self, batch):
            return self.net(batch["x"])

    model = Model(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    for x, y in private.loader(data()):
        cross_entropy(model(UserDict(x=x)), y).backward()
        with pytest.raises(PrivacyError, match="hides tensors in an object"):
            optimizer.step()
