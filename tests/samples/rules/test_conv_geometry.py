import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from samples.loop import per_sample_loop, sum_loss
from torch import nn
from torch.testing import assert_close

from dome.parameters import Layout
from dome.samples import PerSample

LAYERS = {
    False: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    True: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}


@st.composite
def convolutions(draw):
    rank, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    each = st.integers(1, 3)

    def sizes(numbers):
        return tuple(draw(numbers) for _ in range(rank))

    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 9 if rank == 1 else 3))
    stride, dilation, kernel = sizes(each), sizes(st.integers(1, 2)), sizes(each)
    options = {"stride": stride, "dilation": dilation, "bias": draw(st.booleans())}
    if transposed:
        options["padding"] = sizes(st.integers(0, 1))
        limits = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
        options["output_padding"] = tuple(draw(st.integers(0, n - 1)) for n in limits)
    else:
        words = ["valid", "same"] if max(stride) == 1 else ["valid"]
        options["padding"] = draw(
            st.sampled_from(words) | st.just(sizes(st.integers(0, 2)))
        )
        options["padding_mode"] = draw(
            st.sampled_from(["zeros", "reflect", "circular"])
        )
    sides = sizes(st.integers(3, 6))
    shape = (draw(st.integers(1, 4)), channels, *sides)
    layer = LAYERS[transposed][rank - 1]
    return layer, channels, groups * draw(each), kernel, groups, options, shape


@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(convolutions(), st.integers(0, 2**32 - 1))
def test_any_convolution_is_the_loop(convolution, seed):
    layer, inputs, outputs, kernel, groups, options, shape = convolution
    torch.manual_seed(seed)
    model = layer(inputs, outputs, kernel, groups=groups, **options).double()
    x = torch.randn(shape, dtype=torch.float64)
    try:
        expected = model(x)
    except RuntimeError:
        assume(False)
    source = PerSample(model, Layout(model))
    output = model(x)
    sum_loss(output).backward()
    rows, total = source.take(), Layout(model).gather()
    source.detach()
    assert_close(output, expected)
    assert_close(rows, per_sample_loop(model, [x]))
    assert_close(rows.sum(0), total)


@pytest.mark.parametrize("batch", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("channels", [2, 16])
def test_batches_of_any_size_are_cut_into_chunks_without_a_seam(batch, channels):
    torch.manual_seed(0)
    model = nn.Conv2d(channels, 4, 3, padding=1).double()
    x = torch.randn(batch, channels, 4, 4, dtype=torch.float64)
    source = PerSample(model, Layout(model))
    F.relu(model(x), inplace=True).square().sum().backward()
    rows, total = source.take(), Layout(model).gather()
    source.detach()
    loop = per_sample_loop(model, [x], loss=lambda y: y.relu().square().sum())
    assert_close(rows, loop)
    assert_close(total, loop.sum(0))
