import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import dome
from dome.samples.calls import LossCall, own_loss

pytestmark = pytest.mark.usefixtures("float64")

WRAPS = {
    "loss": lambda loss, z: loss,
    "loss, logits": lambda loss, z: (loss, z),
    "logits, loss": lambda loss, z: (z, loss),
    "dictionary": lambda loss, z: {"logits": z, "loss": loss},
}


class Language(nn.Module):
    """As nanoGPT's: ids and targets, and the loss next to the logits."""

    def __init__(self, wrap=WRAPS["logits, loss"]):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.wrap = wrap

    def forward(self, idx, targets=None):
        z = self.head(self.table(idx))
        if targets is None:
            return z, None
        return self.wrap(cross_entropy(z.flatten(0, 1), targets.flatten()), z)


def texts():
    return torch.randint(7, (5, 3)), torch.randint(7, (5, 3))


def ways(x, y):
    """The same batch in every way that the convention allows."""
    return {
        "x and y": ((x, y), {}),
        "a tuple": (((x, y),), {}),
        "a list": (([x, y],), {}),
        "a dictionary": (({"idx": x, "targets": y},), {}),
        "by name": ((), {"idx": x, "targets": y}),
        "mixed": ((x,), {"targets": y}),
    }


def loop(model, x, y):
    rows = []
    for b in range(len(x)):
        loss = own_loss(model(x[b : b + 1], y[b : b + 1]))
        grads = torch.autograd.grad(loss, tuple(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("way", ways(*texts()))
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_model_that_returns_its_loss_has_the_rows_of_a_loop(way, wrap):
    model, (x, y) = Language(wrap), texts()
    args, kwargs = ways(x, y)[way]
    G = dome.per_sample_gradients(model, None, *args, **kwargs)
    assert_close(G, loop(model, x, y))
    report = dome.verify(model, None, *args, **kwargs)
    assert report.ok, report
    assert report.num_samples == 5


def test_a_loss_function_takes_results_and_targets_or_results_alone():
    model, (x, y) = Language(), texts()

    def loss_fn(results, targets=y):
        return cross_entropy(results[0].flatten(0, 1), targets.flatten())

    expected = loop(model, x, y)
    for args, kwargs in (
        ((x, y), {}),
        ((x,), {}),
        (({"idx": x}, y), {}),
        ((), {"idx": x}),
    ):
        G = dome.per_sample_gradients(model, loss_fn, *args, **kwargs)
        assert_close(G, expected)


def test_rows_may_have_names():
    model, (x, y) = Language(), texts()
    G = dome.per_sample_gradients(model, None, x, y)
    named = dome.per_sample_gradients(model, None, x, y, as_dict=True)
    assert list(named) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert named[name].shape == (5, *p.shape)
    assert_close(torch.cat([g.flatten(1) for g in named.values()], dim=1), G)


def test_inputs_that_hold_no_samples_are_declared():
    class Scaled(nn.Linear):
        def forward(self, x, table):
            return super().forward(x) @ table

    model, x, table = Scaled(3, 4), torch.randn(4, 3), torch.randn(4, 4)
    G = dome.per_sample_gradients(
        model, lambda z: z.square().mean(), (x, table), samples_in="x"
    )
    for b in range(4):
        loss = model(x[b : b + 1], table).square().mean()
        grads = torch.autograd.grad(loss, tuple(model.parameters()))
        assert_close(G[b], torch.cat([g.flatten() for g in grads]))
    with pytest.raises(ValueError, match="samples_in names 'y'"):
        dome.per_sample_gradients(model, None, (x, table), samples_in="y")


def test_what_a_loader_yields_is_a_call():
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    model = nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    call = LossCall.of_batch(cross_entropy, next(iter(loader)))
    assert_close(call.loss(model), cross_entropy(model(x), y))
    language, (ids, targets) = Language(), texts()
    for batch in ((ids, targets), {"idx": ids, "targets": targets}):
        call = LossCall.of_batch(None, batch).to(torch.device("cpu"))
        assert_close(call.loss(language), language(ids, targets)[1])


def test_two_inputs_in_front_of_the_target_of_a_loader_go_to_the_model():
    call = LossCall.of_batch(cross_entropy, [*texts(), torch.arange(5)])
    assert len(call.args) == 2
    assert len(call.targets) == 1


def test_a_named_tuple_is_one_input():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    assert LossCall.of(cross_entropy, packed).args == (packed,)


def test_logits_of_one_number_are_not_taken_for_the_loss():
    logits, loss = torch.tensor([[3.0]]), torch.tensor(0.5)
    assert own_loss((logits, loss)) == loss
    assert own_loss((loss, logits)) == loss


def test_what_cannot_be_called_is_refused_by_name():
    x, y = texts()
    with pytest.raises(TypeError, match=r"loss_fn must be a function.*got Tensor"):
        dome.per_sample_gradients(Language(), x, y)
    with pytest.raises(ValueError, match="no input: give x"):
        dome.verify(Language(), None)
    with pytest.raises(ValueError, match="y has no name"):
        dome.verify(Language(), None, {"idx": x}, y)
    with pytest.raises(ValueError, match="tuple without a scalar loss"):
        dome.verify(Language(), None, x)


@pytest.mark.parametrize("function", [dome.verify, dome.per_sample_gradients])
def test_every_function_spells_the_convention_alike(function):
    names = list(inspect.signature(function).parameters)
    assert names[:4] == ["model", "loss_fn", "x", "y"]
    assert names[-1] == "inputs"
