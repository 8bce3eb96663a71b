import pytest
import torch
from docs.examples import example
from torch import nn
from torch.autograd import Function

import dome
from dome.samples.rules import RULES
from dome.testing import check_rule

pytestmark = pytest.mark.usefixtures("own_rules")


@pytest.fixture
def own_rules(monkeypatch):
    # What a test adds goes with it.
    for operation in list(RULES):
        monkeypatch.setitem(RULES, operation, RULES[operation])
    before = set(RULES)
    yield
    for operation in set(RULES) - before:
        del RULES[operation]


def scale_class(**members):
    """x * weight, made anew: a rule belongs to a class."""

    class Scale(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, delta):
            x, weight = ctx.saved_tensors
            return delta * weight, (delta * x).sum(0)

    return type("Scale", (Scale,), members)


def scale_rows(delta, x, weight):
    return {"weight": delta * x}


class Net(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))
        self.operation = operation

    def forward(self, x):
        scaled = self.operation(self.first(x), self.weight)
        return self.last(torch.tanh(scaled))


@pytest.fixture
def x(rng):
    return torch.randn(6, 4, generator=rng, dtype=torch.float64)


def net(operation):
    return Net(operation).double()


def test_the_rule_of_the_docs_keeps_the_contract(x):
    Scaled = example("how-to/extend.md", "Scaled")
    check_rule(nn.Sequential(nn.Linear(4, 8), Scaled()).double(), x)


def test_an_autograd_function_without_a_rule_is_refused_with_the_way_out(x):
    Scale = scale_class()
    with pytest.raises(RuntimeError, match=r"'weight'.*rule with dome\.sample_rule"):
        dome.per_sample_gradients(net(Scale.apply), nn.MSELoss(), x, x[:, :2])


def test_a_rule_gives_the_samples_of_an_autograd_function(x):
    Scale = scale_class()
    dome.sample_rule(Scale)(scale_rows)
    check_rule(net(Scale.apply), x)


def test_a_function_with_a_vmap_rule_is_made_visible(x):
    class Scale(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, weight):
            return x * weight

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, delta):
            x, weight = ctx.saved_tensors
            return delta * weight, (delta * x).sum(0)

    dome.sample_rule(Scale)
    dome.sample_rule(Scale)  # twice is once
    check_rule(net(Scale.apply), x)


def test_a_rule_takes_the_place_of_vmap_for_an_operation_of_torch_library(x):
    @torch.library.custom_op("dome_tests::scale", mutates_args=())
    def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    def backward(ctx, delta):
        x, weight = ctx.saved_tensors
        return delta * weight, (delta * x).sum(0)

    scale.register_autograd(
        backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    seen = []

    @dome.sample_rule(scale)
    def rule(delta, x, weight):
        seen.append(delta.shape)
        return scale_rows(delta, x, weight)

    check_rule(net(scale), x)
    check_rule(net(torch.ops.dome_tests.scale), x)
    assert torch.Size([6, 4]) in seen


def test_merged_dimensions_are_added_up_by_sample(rng):
    Scale = scale_class()
    dome.sample_rule(Scale)(scale_rows)

    class Words(Net):
        def forward(self, x):
            return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)

    x = torch.randn(5, 3, 4, generator=rng, dtype=torch.float64)
    check_rule(Words(Scale.apply).double(), x)


def test_weights_made_of_parameters_are_pulled_back(x):
    Scale = scale_class()
    dome.sample_rule(Scale)(scale_rows)
    check_rule(net(lambda x, weight: Scale.apply(x, weight.exp())), x)


def test_a_filter_trains_on_the_rows(x):
    Scale = scale_class()
    dome.sample_rule(Scale)(scale_rows)
    model = net(Scale.apply)
    grad_filter = dome.GradientFilter(model, rank=3)
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
        grad_filter.step()
    assert 0 < grad_filter.stats.kept_norm < 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda delta, x, weight: {"weight": 2 * delta * x}, "'weight' miss a part"),
        (lambda delta, x, weight: {}, "returns nothing for 'weight'"),
        (lambda delta, x, weight: delta * x, "returns Tensor, not a dictionary"),
        (
            lambda delta, x, weight: {"weight": (delta * x).sum(0)},
            r"returns \(4,\) for 'weight', not gradients of shape \(6, 4\)",
        ),
        (lambda delta, x: {}, "cannot follow the samples through 'Scale'.*too many"),
    ],
)
def test_a_wrong_rule_is_an_error_that_names_the_parameter(rule, message, x):
    Scale = scale_class()
    dome.sample_rule(Scale)(rule)
    with pytest.raises(RuntimeError, match=message):
        check_rule(net(Scale.apply), x)


def test_samples_along_another_dimension_are_refused(x):
    Scale = scale_class()
    dome.sample_rule(Scale)(scale_rows)
    model = net(lambda x, weight: Scale.apply(x.mT, weight[:, None]).mT)
    with pytest.raises(RuntimeError, match=r"'weight'.*along the first dimension"):
        dome.verify(model, lambda out: out.sum(), x)


def test_what_is_written_over_before_backward_is_an_error(x):
    Scale = scale_class(backward=staticmethod(lambda ctx, delta: (delta, delta.sum(0))))
    dome.sample_rule(Scale)(scale_rows)

    def operation(x, weight):
        out = Scale.apply(x, weight)
        x.detach().zero_()
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        dome.per_sample_gradients(net(operation), lambda out: out.sum(), x)


@pytest.mark.parametrize("operation", [torch.relu, nn.Linear, scale_rows, 3])
def test_what_needs_no_rule_is_refused(operation):
    with pytest.raises(ValueError, match="operation must be a class of"):
        dome.sample_rule(operation)


def test_a_rule_must_be_a_function():
    with pytest.raises(ValueError, match="a rule must be a function, got 3"):
        dome.sample_rule(scale_class())(3)
