import sys
import unittest
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dome.parameters import Layout
from dome.samples import PerSample

# One or two operations of each kind, for every day; the slow test takes all.
SOME = {
    *("add", "mul", "pow", "atan2", "where", "lerp", "addcmul", "clamp", "masked_fill"),
    *("matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum", "tensordot"),
    *("kron", "cartesian_prod", "masked_scatter", "index_put", "index_copy", "scatter"),
    *("cat", "stack", "nn.functional.linear", "nn.functional.bilinear", "cdist"),
    *("nn.functional.conv2d", "nn.functional.group_norm", "nn.functional.layer_norm"),
    *("nn.functional.embedding_bag", "nn.functional.rms_norm", "linalg.multi_dot"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.instance_norm"),
    *("linalg.solve", "searchsorted", "max_binary", "nn.functional.prelu", "normal"),
    *("nn.functional.linear_cross_entropy", "nn.functional.cosine_similarity"),
}
CASES_OF_EACH = 4


class Operation(nn.Module):
    """One operation of samples and one parameter, everything else held fixed."""

    def __init__(self, function, values, spec, samples, parameter, copies):
        super().__init__()
        self.function, self.values, self.spec = function, values, spec
        self.samples, self.parameter, self.copies = samples, parameter, copies
        self.weight = nn.Parameter(values[parameter].clone())

    def forward(self, x):
        values = [v.clone() if isinstance(v, torch.Tensor) else v for v in self.values]
        # A parameter itself cannot be written to.
        weight = self.weight * 1 if self.copies else self.weight
        values[self.samples], values[self.parameter] = x.clone(), weight
        args, kwargs = tree_unflatten(values, self.spec)
        return self.function(*args, **kwargs)


@pytest.fixture
def database(monkeypatch):
    # Torch's own tests import it, for what nobody needs here.
    stub = SimpleNamespace(TestCase=unittest.TestCase)
    monkeypatch.setitem(sys.modules, "expecttest", stub)
    # Nor may it forbid tests that follow in this process to set torch's flags.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes]


def operations(op):
    """Every choice of samples and one parameter among the arguments of an operation."""
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        values, spec = tree_flatten(arguments)
        real = [
            i
            for i, v in enumerate(values)
            if isinstance(v, torch.Tensor) and v.is_floating_point()
        ]
        batches = [i for i in real if values[i].ndim and 1 < len(values[i]) < 40]
        for samples in batches[:2]:
            for parameter in real[:3]:
                for function in (op.op, op.inplace_variant):
                    if samples != parameter and function is not None:
                        copies = function is not op.op
                        places = (samples, parameter, copies)
                        yield Operation(function, values, spec, *places)


def results(model, x):
    torch.manual_seed(3)
    output = [t for t in tree_flatten(model(x))[0] if isinstance(t, torch.Tensor)]
    return [*output, torch.get_rng_state()]


def outcome(model, x):
    """What capture makes of an operation; None if plain torch has no result."""
    try:
        plain = results(model, x)
        source = PerSample(model, Layout(model))
    except Exception:  # noqa: BLE001 (of a sparse or an empty parameter, and so on)
        return None
    try:
        found = results(model, x)
    except RuntimeError as error:
        words = ("cannot tell", "mixed by", "microbatch", "SparseCsr")
        return "refused" if any(w in str(error) for w in words) else str(error)
    finally:
        source.detach()
    same = len(found) == len(plain) and all(map(has_same_bits, found, plain))
    return "the same" if same else "other values"


def has_same_bits(a, b):
    a, b = a.detach(), b.detach()
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and (
        torch.equal(a, b)
        or torch.equal(a.isnan() | (a == b), torch.ones_like(a).bool())
    )


def check(database, most):
    wrong, counts = [], {"the same": 0, "refused": 0}
    for op in database:
        looked_at = 0
        for model in operations(op):
            if looked_at == most:
                break
            found = outcome(model, model.values[model.samples])
            looked_at += found is not None
            if found in counts:
                counts[found] += 1
            elif found is not None:
                wrong.append((op.name, model.samples, model.parameter, found))
    assert not wrong
    return counts


@pytest.mark.filterwarnings("ignore")  # of torch's own samples
def test_operations_have_their_own_values_or_are_refused(database):
    counts = check([op for op in database if op.name in SOME], CASES_OF_EACH)
    assert counts["the same"] > 40
    assert counts["refused"] > 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_operations_of_torch_have_their_own_values_or_are_refused(database):
    counts = check(database, CASES_OF_EACH)
    assert counts["the same"] > 350
