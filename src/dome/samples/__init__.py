"""Where gradient samples come from: captured rows, micro-batches, Opacus."""

from torch import nn

from dome.parameters import Layout
from dome.samples.functional import per_sample_gradients
from dome.samples.protocol import SampleSource
from dome.samples.sources.microbatch import MicroBatch
from dome.samples.sources.opacus import OpacusSamples, carries_grad_sample
from dome.samples.sources.per_sample import PerSample
from dome.samples.store.factors import Choose, for_directions
from dome.samples.store.streamed import Use
from dome.samples.tracing.refuse import check_one_process

__all__ = [
    "Choose",
    "MicroBatch",
    "OpacusSamples",
    "PerSample",
    "SampleSource",
    "Use",
    "for_directions",
    "per_sample_gradients",
    "source_for",
]

KINDS = ("per_sample", "microbatch")


def source_for(
    kind: str,
    model: nn.Module,
    layout: Layout,
    *,
    batch_dim: int | None = None,
    allow_mixing: bool = False,
    ignore_penalty: bool = False,
    choose: Choose | None = None,
    use: Use | None = None,
) -> SampleSource:
    """The source of samples by its name; a model under Opacus' hooks is recognised.

    Args:
        kind: "per_sample" or "microbatch".
        model: The model to watch.
        layout: Its tracked parameters.
        batch_dim: The dimension of the input that enumerates the samples, if not 0.
        allow_mixing: Let tracked parameters meet samples that were mixed.
        ignore_penalty: Do not ask whether samples account for all of the gradient.
        choose: Which per-sample gradients are kept as products.
        use: Give the rows of each layer to this while backward() runs, and drop them.
    """
    if kind not in KINDS:
        raise ValueError(f"samples must be one of {KINDS}, got {kind!r}")
    check_one_process(model)
    if use and carries_grad_sample(model):
        raise ValueError(
            "stream=True takes samples from dome's own capture, and this model has "
            "Opacus' grad_sample: leave stream out, or take the model out of Opacus"
        )
    if kind == "microbatch":
        return MicroBatch(model, layout)
    if carries_grad_sample(model):
        return OpacusSamples(model, layout)
    return PerSample(
        model,
        layout,
        batch_dim=batch_dim,
        allow_mixing=allow_mixing,
        ignore_penalty=ignore_penalty,
        choose=choose,
        use=use,
    )
