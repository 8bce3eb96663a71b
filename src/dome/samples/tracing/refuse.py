"""Errors for models and operations whose samples cannot be told apart.

There is one rule about mixed samples: a tracked parameter does not meet them. Once
entries of several samples have come together, a parameter's row would hold parts of
other samples' terms of the loss. A mix that no tracked parameter meets afterwards is
part of the loss.

Differential privacy needs more, no mix at all (``strict``): the sum or mean of the
samples' losses is the one thing they may have in common. What is computed outside the
model is not seen.
"""

import torch
from torch import Tensor, nn

from dome.samples.tracing.axis import Axis, Labels, collapsed
from dome.samples.tracing.inputs import Roles, not_shown
from dome.samples.tracing.nested import Value, all_tensors, tensors
from dome.samples.tracing.origins import Batched, Call, Place, operations
from dome.samples.tracing.trace import Trace
from dome.torch_private import AnyBatchNorm, is_compiled


def check_one_process(model: nn.Module) -> None:
    """Raise ``ValueError`` if this model is spread over workers or devices."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    check_not_deepspeed(model)
    for module in model.modules():
        if isinstance(module, wrappers):
            raise ValueError(
                f"the model is spread over workers by {type(module).__name__}: each "
                "worker would have its own basis, and their parameters would diverge; "
                "use dome.distributed.attach"
            )
        # By name: importing them takes longer than all of dome.
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(split_over_workers("the model"))
    for name, p in model.named_parameters():
        if hasattr(p, "device_mesh"):
            raise ValueError(split_over_workers(f"parameter {name!r}"))


def check_not_deepspeed(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model of DeepSpeed, or parameters cut by its ZeRO."""
    instead = (
        "before the filter could see whole gradients of this worker. Use "
        "DistributedDataParallel, or fully_shard in the place of ZeRO, with "
        "dome.distributed.attach"
    )
    for module in model.modules():
        if type(module).__name__ in ("DeepSpeedEngine", "PipelineEngine"):
            raise ValueError(
                f"the model is a {type(module).__name__}: DeepSpeed reduces gradients "
                f"during backward(), {instead}"
            )
    for name, p in model.named_parameters():
        if hasattr(p, "ds_tensor"):
            raise ValueError(
                f"parameter {name!r} is cut by DeepSpeed's ZeRO (stage 3), {instead}"
            )


def split_over_workers(what: str) -> str:
    """The sentence for parameters of which a worker holds a part."""
    return (
        f"{what} is split over workers (FSDP, tensor parallelism): dome.attach takes "
        "whole gradients. Use dome.distributed.attach: for a model of fully_shard with "
        'samples="worker", for others in DistributedDataParallel'
    )


def check_capturable(model: nn.Module) -> None:
    """Raise ``ValueError`` if per-sample gradients of this model cannot be captured."""
    check_one_process(model)
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a TorchScript module, whose operations cannot be seen: "
                'use the Python module, or samples="microbatch"'
            )
        if is_compiled(module):
            raise ValueError(
                f"{where} is compiled by torch.compile: its operations cannot be seen; "
                "attach to the model as it was before torch.compile and compile it "
                'afterwards, or use samples="microbatch"'
            )
        if isinstance(module, AnyBatchNorm) and module.training:
            raise ValueError(mixes_samples(where))


def reentrant(name: str) -> str:
    """The sentence for a parameter under reentrant activation checkpointing."""
    return (
        f"parameter {name!r} is used under reentrant activation checkpointing, whose "
        "graph is built during backward(), where samples are not captured: pass "
        "use_reentrant=False to checkpoint(), or to Transformers "
        'gradient_checkpointing_kwargs={"use_reentrant": False}; or use '
        'samples="microbatch"'
    )


def not_understood(name: str) -> str:
    """The sentence for a checkpoint that was not entered by torch's function."""
    return (
        f"parameter {name!r} is used under activation checkpointing that was not "
        "entered by torch.utils.checkpoint.checkpoint(): use that function, switch "
        'checkpointing off, or use samples="microbatch"'
    )


def mixes_samples(where: str) -> str:
    """The sentence for batch norm in training mode."""
    return (
        f"{where} is batch norm in training mode, which mixes the samples of a batch: "
        'replace it by GroupNorm, call .eval() on it, or use samples="microbatch"'
    )


ADDING = frozenset(
    operations(
        *("add", "sub", "subtract", "add_", "sub_", "rsub", "__add__", "__radd__"),
        *("__sub__", "__rsub__", "__iadd__", "__isub__"),
    )
)
_TOTALS = frozenset(
    operations(
        *("sum", "mean", "nansum", "cross_entropy", "nll_loss", "mse_loss", "l1_loss"),
        *("smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
        *("binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"),
        *("ctc_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    )
)
_SCALING = frozenset(
    operations(
        *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "neg"),
        *("div", "div_", "__truediv__", "__itruediv__", "divide", "__neg__"),
        *("to", "float", "double", "clone", "contiguous", "view", "reshape", "squeeze"),
    )
)


def are_totals(call: Call) -> bool:
    """Whether a penalty on the weights is added to a loss: it is no sample's part."""
    return (
        call.func in ADDING
        and all(t.ndim == 0 for t in (*call.batched, *call.derived))
        and all(origin.place is None for origin in call.origins)
    )


def admit(trace: Trace, call: Call) -> None:
    """Raise if a tracked parameter meets samples that were mixed."""
    for t, origin in zip(call.batched, call.origins, strict=True):
        if origin.is_fine and isinstance(origin.place, Axis):
            continue
        if origin.mixed is not None and not are_totals(call):
            raise trace.mixes(origin.mixed, *call.derived)
        if origin.hidden is not None and not are_totals(call):
            shape = "" if t.is_nested else f" in {tuple(t.shape)}"
            problem = f"{origin.hidden} has hidden which are whose{shape}"
            raise trace.lost(problem, *call.derived)
        if origin.doubt is not None:
            error = trace.mixes("indexing that joins several", *call.derived)
            trace.questions.raise_if(origin.doubt, error)
        if isinstance(origin.place, Labels):
            trace.met_by_number(*call.derived)
            nobody = trace.lost("some of its rows belong to no sample", *call.derived)
            trace.questions.raise_if((origin.place.ids < 0).any(), nobody)


def settled(
    trace: Trace, place: Place | None, end: int, *weights: Tensor | None
) -> Place | None:
    """A place whose samples change along the dimensions before ``end`` alone.

    None if they do not; by ids, that is a question to the device.
    """
    if isinstance(place, Axis):
        if place.dim < end:
            return place
        # All of a tensor is the sample's that is alone.
        return Axis(0, 1) if place.batch == 1 and end else None
    if place is None or place.last < end:
        return place
    ids, several = collapsed(place.ids, tuple(range(end, place.ids.ndim)))
    error = trace.mixes("indexing that joins several", *weights)
    trace.questions.raise_if(several, error)
    return Labels(ids, place.batch)


def check_order(trace: Trace, output: Value) -> None:
    """Raise if the model's results are its samples in another order than they came.

    A row of the capture belongs to the sample that went in, a term of the loss to the
    place where it comes out.
    """
    if not trace.by_number:
        return
    for t in all_tensors(output):
        place = trace.place(t)
        if isinstance(place, Labels) and t.ndim and len(t) == place.batch:
            ids = place.ids.reshape(len(place.ids), -1)[:, 0].expand(place.batch)
            own = torch.arange(place.batch, device=ids.device)
            moved = (ids.sort().values == own).all() & (ids != own).any()
            problem = "it returns the samples in another order"
            error = trace.lost(problem, *trace.by_number)
            trace.questions.raise_if(moved, error)


def check_roles(trace: Trace, roles: Roles, output: Value) -> None:
    """Raise if what the model did does not bear out which inputs hold samples."""
    lines, names = trace.alignment, list(trace.alignment.names.values())
    name = lines.unclear()
    if name is not None:
        how = "they never meet one by one inside the model"
        raise RuntimeError(lines.sentence(name, trace.batch, how))
    roles.confirm(lines.lined_up())
    if trace.others and not roles.is_shown:
        places = [trace.place(t) for t in all_tensors(output) if t.requires_grad]
        # Row b of a result is sample b: there the first input is borne out.
        if not any(place is not None and place.last == 0 for place in places):
            raise RuntimeError(not_shown(names[0], trace.others, trace.batch))
        roles.is_shown = True


def refuse_mix(trace: Trace, call: Call, out: Value) -> None:
    """Raise if a result that has a gradient is made of several samples."""
    for t in tensors(out):
        origin = trace.origin(t)
        if not isinstance(origin, Batched) or not t.requires_grad:
            continue
        how = origin.mixed or origin.hidden
        if how is not None and not _is_loss(trace, call, t):
            raise trace.mixes(how)
        if origin.place is not None and origin.doubt is not None:
            error = trace.mixes("indexing that joins several")
            trace.questions.raise_if(origin.doubt, error)


def refuse_order(trace: Trace, output: Value) -> None:
    """Raise if a result of the model has one entry a sample, but not in its place."""
    for t in all_tensors(output):
        place = trace.place(t)
        if isinstance(place, Labels) and t.ndim and len(t) == place.batch:
            own = torch.arange(place.batch, device=t.device)
            own = own.view(-1, *(1,) * (t.ndim - 1))
            error = trace.mixes("returning them in another order")
            trace.questions.raise_if((place.ids != own).any(), error)


def _is_loss(trace: Trace, call: Call, t: Tensor) -> bool:
    """Whether a result is a sum of the samples' losses, scaled and shifted at most."""
    if t.ndim:
        return False
    if call.func in _TOTALS:
        return all(trace.place(x) is not None for x in call.batched)
    linear = call.func in _SCALING and len(call.batched) == 1
    return call.func in ADDING or linear
