"""Where gradient samples come from: captured rows, micro-batches, Opacus."""

from torch import nn

from dome.parameters import Layout
from dome.samples.functional import per_sample_gradients
from dome.samples.handed import SampleGradients, sample_gradients
from dome.samples.micro_batch import MicroBatch
from dome.samples.opacus import OpacusSamples, carries_grad_sample
from dome.samples.own_rules import sample_rule
from dome.samples.per_sample import PerSample
from dome.samples.protocol import SampleSource
from dome.samples.store.streamed import Use
from dome.samples.tracing.inputs import declared
from dome.samples.tracing.refuse import check_one_process

__all__ = [
    "MicroBatch",
    "OpacusSamples",
    "PerSample",
    "SampleGradients",
    "SampleSource",
    "Use",
    "declared",
    "per_sample_gradients",
    "sample_gradients",
    "sample_rule",
    "source_for",
]

KINDS = ("per_sample", "microbatch")


def source_for(
    kind: str,
    model: nn.Module,
    layout: Layout,
    *,
    batch_dim: int | None = None,
    samples_in: tuple[str, ...] | None = None,
    allow_mixing: bool = False,
    ignore_penalty: bool = False,
    direction_rank: int | None = None,
    use: Use | None = None,
) -> SampleSource:
    """The source of samples by its name; a model under Opacus' hooks is recognised.

    Args:
        kind: "per_sample" or "microbatch".
        model: The model to watch.
        layout: Its tracked parameters.
        batch_dim: The dimension of the input that enumerates the samples, if not 0.
        samples_in: The names of the inputs that hold samples.
        allow_mixing: Let tracked parameters meet samples that were mixed.
        ignore_penalty: Do not ask whether samples account for all of the gradient.
        direction_rank: Rank of the directions that samples are kept as products for.
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
    if samples_in and carries_grad_sample(model):
        raise ValueError(
            "samples_in is for dome's own capture, and this model has Opacus' "
            "grad_sample, which finds samples by itself: leave samples_in out"
        )
    if kind == "microbatch":
        return MicroBatch(model, layout, batch_dim=batch_dim)
    if carries_grad_sample(model):
        return OpacusSamples(model, layout)
    return PerSample(
        model,
        layout,
        batch_dim=batch_dim,
        samples_in=samples_in,
        allow_mixing=allow_mixing,
        ignore_penalty=ignore_penalty,
        direction_rank=direction_rank,
        use=use,
    )
