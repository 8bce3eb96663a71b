from functools import partial

import pytest
from samples.loop import per_sample_loop, sum_loss, tensors_in
from samples.models import built
from samples.rules.cases_indexing import INDEXING
from samples.rules.cases_layers import LAYERS
from samples.rules.cases_parameters import PARAMETERS
from samples.rules.cases_sequences import SEQUENCES, TIME_FIRST
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from dome.parameters import Layout
from dome.samples import PerSample

CASES = {
    **{
        f"{name}": (make, 0)
        for name, make in {**LAYERS, **SEQUENCES, **PARAMETERS, **INDEXING}.items()
    },
    **{f"{name} time first": (make, 1) for name, make in TIME_FIRST.items()},
}


pytestmark = pytest.mark.usefixtures("float64")


# Torch's own remark on even kernels, from the plain model.
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("make", "batch_dim"), CASES.values(), ids=CASES.keys())
def test_rows_gradient_and_output_are_those_of_plain_torch(make, batch_dim):
    plain, model, inputs = built(make)
    expected = plain(*inputs)
    sum_loss(expected).backward()

    source = PerSample(model, Layout(model), batch_dim=batch_dim)
    output = model(*inputs)
    sum_loss(output).backward()
    rows = source.take()
    source.detach()

    assert_close(tensors_in(output), tensors_in(expected))
    assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
    )
    assert_close(rows, per_sample_loop(model, inputs, batch_dim))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("make", "batch_dim"), CASES.values(), ids=CASES.keys())
def test_rows_are_the_same_under_activation_checkpointing(make, batch_dim):
    rows = []
    for model in built(make)[:2]:
        *_, inputs = built(make)
        if rows:
            inside = partial(checkpoint, model.forward, use_reentrant=False)
            model.forward = partial(checkpoint, inside, use_reentrant=False)
        source = PerSample(model, Layout(model), batch_dim=batch_dim)
        sum_loss(model(*inputs)).backward()
        rows.append(source.take())
        source.detach()
    assert_close(rows[1], rows[0], rtol=0, atol=0)
