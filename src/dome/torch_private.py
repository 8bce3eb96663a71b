"""Every name of torch that is not public, in one place.

Nothing promises that these stay. Each says which versions of torch were seen with it
and what happens without it; the other rooms use them under the names given here.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from inspect import signature
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils import _python_dispatch, checkpoint
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    # A type of torch.distributed, which has it where it was built with it.
    from torch._C._distributed_c10d import GradBucket as GradBucket

try:
    # The abstract kinds behind BatchNorm1d, 2d, 3d and their synchronised and lazy
    # forms, under these names since torch 1.
    # Switches autocast off for all devices at once, also for those that have none, of
    # which torch.autocast wants to be told. Torch 2.8 to 2.15.
    from torch._C import _DisableAutocast as no_autocast

    # Keeps the number of a storage from being used again. Torch 2.8 to 2.15.
    from torch.multiprocessing.reductions import StorageWeakRef as StorageRef
    from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm

    # Sees every operation below autograd and autocast. Torch 2.8 to 2.15.
    from torch.utils._python_dispatch import TorchDispatchMode

    # Torch 2.8 to 2.15. A public torch.utils.pytree exists in the newest only.
    from torch.utils._pytree import (
        tree_flatten,
        tree_map,
        tree_map_only,
        tree_unflatten,
    )
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has no {error}, which dome needs: use a version of "
        f"torch that the README's support table names"
    ) from error

__all__ = [
    "AnyBatchNorm",
    "AnyInstanceNorm",
    "GraphBreak",
    "StorageRef",
    "TorchDispatchMode",
    "applied",
    "buffers_of",
    "checkpoint_arguments",
    "checkpoint_frame",
    "communication_hook",
    "copy_all_",
    "current_graph_task",
    "flattened",
    "float32_products",
    "follows_several",
    "fsdp_communication",
    "fsdp_groups",
    "fused",
    "hook_after_first",
    "hook_first",
    "hooks_on_saved",
    "in_checkpoint_recomputation",
    "in_compiled_autograd",
    "in_function_mode",
    "in_reentrant_checkpoint",
    "inside_transform",
    "is_compiled",
    "never_compile",
    "no_autocast",
    "norms_of",
    "not_a_view",
    "overloads_of",
    "own_arithmetic",
    "raising_if_differentiated",
    "rounding",
    "runs_step_hooks",
    "schema_arguments",
    "storage_key",
    "subtract_each_",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "uncompiled",
    "unflattened",
    "unpacked",
    "unseen",
    "version_of",
    "versions_of",
    "when_backward_ends",
    "will_run",
]


P = ParamSpec("P")
R = TypeVar("R")


def _needed(owner: object, name: str) -> Callable[..., Any]:
    """A function of torch; where it is missing, one that says so when called."""

    def missing(*_: object) -> None:
        raise RuntimeError(_lacks(name))

    return getattr(owner, name, missing)


def _lacks(name: str) -> str:
    return (
        f"torch {torch.__version__} has no {name}, which dome needs: use a version of "
        f"torch that the README's support table names"
    )


# The fused recurrent layers and cells as nn.LSTM and its kin call them: what a
# TorchFunctionMode gets to see. Torch 2.8 to 2.15.
fused = torch._VF

# A number for the backward pass that runs in this thread, -1 outside of one; torch's
# own checkpointing relies on it. Torch 2.8 to 2.15, no way without it.
current_graph_task: Callable[[], int] = _needed(torch._C, "_current_graph_task_id")

# Whether the running backward pass comes by a node; RuntimeError for a leaf that
# autograd.grad() was asked for. Torch 2.8 to 2.15, no way without it.
will_run: Callable[[Node], bool] = _needed(torch._C, "_will_engine_execute_node")


# Calls a function once the running backward pass has filled every ``.grad``: what DDP
# ends its own with. In every torch 2, no way without it.
when_backward_ends: Callable[[Callable[[], None]], None] = _needed(
    getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback"
)


def own_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without a graph, and in the precision of its own tensors.

    A step or backward pass may be called under autocast, where products of float32
    numbers keep 8 bits.
    """

    @wraps(function)
    def undisturbed(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), no_autocast():
            return function(*args, **kwargs)

    return undisturbed


def rounding(t: Tensor) -> float:
    """Relative size of a rounding in products of such numbers, as torch is set now.

    0 for integers, whose products are exact.
    """
    if not (t.is_floating_point() or t.is_complex()):
        return 0.0
    kind = t.device.type
    dtypes = [t.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    if t.dtype in (torch.float32, torch.complex64):
        dtypes.append(float32_products(kind))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def float32_products(kind: str) -> torch.dtype:
    """The type whose digits products of float32 numbers keep on a kind of device.

    float16 stands for TF32, which has as many.
    """
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        is_medium = torch.get_float32_matmul_precision() == "medium"
        return _KEPT["bf16" if is_medium and kind == "cpu" else _older(kind)]
    given = {attrgetter(name)(torch.backends) for name in _SWITCHES.get(kind, ())}
    return next((t for name, t in _KEPT.items() if name in given), torch.float32)


def _older(kind: str) -> str:
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return "tf32" if kind == "cuda" and any(flags) else "ieee"


_SWITCHES = {
    "cpu": [f"mkldnn.{op}.fp32_precision" for op in ("matmul", "conv", "rnn")],
    "cuda": [
        *("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"),
        "cudnn.rnn.fp32_precision",
    ],
}
_KEPT = {"bf16": torch.bfloat16, "tf32": torch.float16, "ieee": torch.float32}


def version_of(t: Tensor) -> int:
    """How often a tensor was written to in place; 0 if made under inference_mode."""
    # In every torch 2 and in its notes on autograd, but without a public name.
    try:
        return t._version
    except AttributeError as error:
        raise RuntimeError(_lacks("Tensor._version")) from error
    except RuntimeError:  # made under inference_mode, where nobody counts
        return 0


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """The same of each; -1 for None."""
    try:
        return [-1 if t is None else t._version for t in tensors]
    except (AttributeError, RuntimeError):  # one of them needs the longer way
        return [-1 if t is None else version_of(t) for t in tensors]


def storage_key(t: Tensor) -> int | None:
    """The same for all tensors in one memory; None for one that has none."""
    # In every torch 2. A key is free again when nobody refers to the storage, weakly
    # (``StorageRef``) or not.
    try:
        return t.untyped_storage()._cdata
    except AttributeError as error:
        raise RuntimeError(_lacks("UntypedStorage._cdata")) from error
    except (RuntimeError, NotImplementedError):  # sparse, or a stand-in of torch.func
        return None


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name; to write to it is to set and delete them."""
    # As old as modules are, and without a public name where a buffer is None.
    buffers: dict[str, Tensor | None] = module._buffers
    return buffers


def hook_first(t: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """A hook on a gradient that runs before those there are, which may change it."""
    earlier = dict(t._backward_hooks or {})
    handle: RemovableHandle = t.register_hook(hook)
    hooks = t._backward_hooks or {}
    # Torch 2.8 to 2.15: autograd runs them in the order in which they were put there.
    for number, other in earlier.items():
        del hooks[number]
        hooks[number] = other
    return handle


def hook_after_first(t: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """A hook on a filled ``.grad`` that runs before those there are."""
    handle: RemovableHandle = t.register_post_accumulate_grad_hook(hook)
    # Torch 2.8 to 2.15: they run in the order of this dictionary.
    hooks: Any = t._post_accumulate_grad_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def inside_transform() -> bool:
    """Whether torch.func or forward-mode differentiation sees what runs now."""
    # 2.8 to 2.15; without it torch says that functions of dome's cannot be transformed.
    functorch = getattr(torch._C, "_functorch", None)
    stack = getattr(functorch, "peek_interpreter_stack", None)
    transformed = stack is not None and stack() is not None
    return transformed or getattr(forward_ad, "_current_level", -1) >= 0


def applied(function: type[Function], *args: Any) -> Any:  # noqa: ANN401 (torch's)
    """``function.apply(*args)`` of an autograd function, by the shorter way."""
    # 2.8 to 2.15: where no transform of torch.func is active, ``apply`` of Function
    # does nothing for us but look whether one is.
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    if active is None or active():
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]  # untyped in torch


def follows_several(t: Tensor | None) -> bool:
    """Whether a gradient stands for several at once (``is_grads_batched``)."""
    # 2.8 to 2.15; without it torch's own message is all there is.
    functorch = getattr(torch._C, "_functorch", None)
    kinds = ("is_batchedtensor", "is_legacy_batchedtensor")
    asks = [getattr(functorch, kind, None) for kind in kinds]
    return t is not None and any(ask(t) for ask in asks if ask is not None)


# Tensors one after the other as one vector, which is a view of a single one; and pieces
# of a vector, views in the shapes of tensors that all have numbers. In DDP's Python
# since torch 1: a third of the time of torch.cat of reshaped ones.
flattened: Callable[[Sequence[Tensor]], Tensor] = _needed(
    torch._utils, "_flatten_dense_tensors"
)
unflattened: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = _needed(
    torch._utils, "_unflatten_dense_tensors"
)

# One call for many tensors, as torch's own optimizers and clipping make it: copy each
# source into its target, the norm of each, subtract each from its target. 2.8 to 2.15.
copy_all_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _needed(
    torch, "_foreach_copy_"
)
norms_of: Callable[[Sequence[Tensor]], Sequence[Tensor]] = _needed(
    torch, "_foreach_norm"
)
subtract_each_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _needed(
    torch, "_foreach_sub_"
)


def raising_if_differentiated(
    message: str, results: Sequence[Tensor | None], sources: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Results of a backward that raise where they are differentiated again.

    Also by one of their sources, which torch would take for unused otherwise.
    """
    # What torch's own once_differentiable is made of: 2.8 to 2.15, no way without it.
    refuse = _needed(torch._C._functions, "DelayedError")(
        message.encode(), len(results) + len(sources)
    )
    own = (r if r is None else r.detach().requires_grad_() for r in results)
    refusing: tuple[Tensor | None, ...] = refuse(*own, *sources)
    return refusing[: len(results)]


def not_a_view(t: Tensor) -> Tensor:
    """The same memory as a tensor that autograd does not know as a view."""
    # 2.8 to 2.15; a copy is the way without it, and where a mode may have kept the
    # product (selective checkpointing does), which a later operation in place would
    # change behind its back.
    if not t._is_view():
        return t
    if _num_dispatch_modes is None or _num_dispatch_modes():
        return t.clone()
    return t.detach()


_num_dispatch_modes: Callable[[], int] | None = getattr(
    torch._C, "_len_torch_dispatch_stack", None
)


def in_function_mode() -> bool:
    """Whether a ``TorchFunctionMode`` sees operations now."""
    # 2.8 to 2.15; without it autograd functions of the user's stay unseen.
    depth = getattr(torch._C, "_len_torch_function_stack", None)
    return depth is not None and depth() > 0


def overloads_of(operation: object) -> tuple[Callable[..., Any], ...]:
    """An operation of ``torch.library`` as modes see it; nothing of what is none."""
    # 2.8 to 2.15; without these names no operation is known.
    operation = getattr(operation, "_opoverload", operation)
    packet = getattr(operation, "overloadpacket", operation)
    names = getattr(packet, "overloads", None)
    if names is None:
        return ()
    return (packet, *(getattr(packet, name) for name in names()))


def schema_arguments(name: str) -> list[list[tuple[str, str, Any]]]:
    """Names, types and defaults of the arguments of an operation, by overload."""
    # 2.8 to 2.15; without it operations are taken to work entry by entry.
    find = getattr(torch._C, "_jit_get_schemas_for_operator", None)
    schemas = [] if find is None else find(f"aten::{name}")
    return [
        [(a.name, str(a.type), a.default_value) for a in schema.arguments]
        for schema in schemas
    ]


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer calls its hooks: wrappers only inherit how to add them."""
    # 2.8 to 2.15; without it every optimizer is taken for a wrapper and refused.
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run code that torch.compile made."""
    # By name: importing torch._dynamo costs a second that most users need not pay. 2.8
    # to 2.15; without these names a compiled module is not told from another.
    compiled = type(module).__name__ == "OptimizedModule"
    return compiled or getattr(module, "_compiled_call_impl", None) is not None


def uncompiled() -> AbstractContextManager[Any]:
    """Let compiled modules and functions that are called inside run as Python."""
    # Most programs never load the compiler, which costs a second.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    # What a compiled function that is running calls from here on, until it ends: what
    # torch.compiler.disable does around one function. 2.8 to 2.15; without it torch
    # compiles dome's own code along, with the same rows.
    set_callback = getattr(torch._C._dynamo.eval_frame, "set_eval_frame", None)
    if set_callback is not None:
        set_callback(None)
    # Public since 2.6. It holds for all threads: what another one calls meanwhile is
    # not compiled either, and gives the same numbers.
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def never_compile(package: str) -> None:
    """Have torch.compile leave the code of a package as it is: Python.

    Otherwise it looks into hooks and modes, which it cannot follow, and warns.
    """
    # Where an optimizer was made the compiler is loaded. 2.6 to 2.15; without it there
    # are warnings.
    rules = sys.modules.get("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)
    if add is not None and package not in _never_compiled:
        _never_compiled.add(package)
        add(package)


_never_compiled: set[str] = set()


class GraphBreak:
    """A hook that does nothing, at which torch.compile ends a graph without a warning.

    Args:
        reason: What is said where there may be one graph only (``fullgraph=True``).
    """

    _is_seen = False

    def __init__(self, reason: str) -> None:
        if "torch._dynamo" in sys.modules and not GraphBreak._is_seen:
            GraphBreak._is_seen = True
            # The reason may be given since 2.8.
            takes_reason = "reason" in signature(torch.compiler.disable).parameters
            more = {"reason": reason} if takes_reason else {}
            disabled = torch.compiler.disable(GraphBreak.__call__, **more)
            GraphBreak.__call__ = disabled  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphBreak, ("",)

    def __call__(self, *_: object) -> None:
        """Nothing."""


def in_compiled_autograd() -> bool:
    """Whether the running backward pass is one that torch compiled."""
    # 2.6 to 2.15; without it torch's own errors about queue_callback are all there is.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def communication_hook(model: nn.Module) -> str | None:
    """The name of the hook that a DDP model would send gradients by, None without."""
    # 2.8 to 2.15; without it a hook is not noticed, and not called.
    hooks = getattr(model, "_comm_hooks", ())
    if hooks:
        return getattr(hooks[0][0], "__name__", type(hooks[0][0]).__name__)
    # Torch's own two in C++ stand in no list.
    logger = getattr(model, "logger", None)
    data = {} if logger is None else logger._get_ddp_logging_data().strs_map
    return data.get("comm_hook") or None


def fsdp_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that ``fully_shard`` reduces together, of one module.

    They are ``FSDPParamGroup`` of torch, whose ``gradient_divide_factor`` and
    ``force_sum_reduction_for_comms`` have public setters, and are read to be put back
    later; and ``fsdp_params``, each with a ``sharded_param``.
    """
    # 2.9 to 2.15; one group a module until 2.10, a list of them since.
    state = _needed(module, "_get_fsdp_state")()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
    return [group for group in groups if group is not None]


def fsdp_communication(group: Any) -> tuple[Any, Any]:  # noqa: ANN401 (FSDPParamGroup)
    """The reduce-scatter and the all-gather of such a group, to be put back later."""
    # 2.9 to 2.15; they have public setters alone.
    for name in ("_reduce_scatter_comm", "_all_gather_comm"):
        if not hasattr(group, name):
            raise RuntimeError(_lacks(name))
    return group._reduce_scatter_comm, group._all_gather_comm


# What packs and unpacks tensors that are saved now; None says that no checkpoint
# is active. Asked for every operation. Torch 2.8 to 2.15, no way without it.
hooks_on_saved: Callable[[], Any | None] = partial(
    _needed(torch._C._autograd, "_top_saved_tensors_default_hooks"), True
)


def checkpoint_frame() -> Any | None:  # noqa: ANN401 (a class of torch that is private)
    """The innermost activation checkpoint that what runs now is part of, or None.

    It is a ``_CheckpointFrame`` of ``torch.utils.checkpoint``, whose ``recompute_fn``
    computes the region again in backward(); the reentrant kind has none.
    """
    # 2.8 to 2.15: the hook that packs what is saved closes over the frame.
    hooks = hooks_on_saved()
    if hooks is None or getattr(hooks[0], "__module__", "") != checkpoint.__name__:
        return None
    owner = hooks[0].__qualname__.partition(".")[0]
    if owner == "_recomputation_hook":
        return None
    for cell in hooks[0].__closure__ or ():
        if isinstance(cell.cell_contents, checkpoint._CheckpointFrame):
            return cell.cell_contents
    raise RuntimeError(_unknown_checkpoint())


def checkpoint_arguments(frame: Any) -> tuple[Any, ...] | None:  # noqa: ANN401
    """What ``checkpoint(function, *args)`` of this frame was given as ``args``.

    None for a frame that was made by other ways than this function. To be asked while
    it runs. Torch 2.8 to 2.15: names of variables in it and its generator.
    """
    for caller in _callers(*_CHECKPOINT):
        if _frame_of(caller) is frame:
            args: tuple[Any, ...] = caller.f_locals["args"]
            return args
    return None


def in_checkpoint_recomputation() -> bool:
    """Whether what runs now is computed again for a checkpoint that is not reentrant.

    Torch 2.8 to 2.15: by the name of the function that does it.
    """
    # Torch packs what it computes again, too: without hooks there is nothing to find.
    return hooks_on_saved() is not None and any(_callers("recompute_fn"))


def in_reentrant_checkpoint() -> bool:
    """Whether what runs now is in the forward pass of a reentrant checkpoint.

    Torch 2.8 to 2.15: by the variable that says so in ``checkpoint()``.
    """
    return any(f.f_locals.get("use_reentrant") for f in _callers(*_CHECKPOINT))


# What runs a region: the first in 2.8 to 2.13, the second, called by it, in 2.15.
_CHECKPOINT = ("checkpoint", "_checkpoint_impl")


def unpacked() -> AbstractContextManager[Any]:
    """Inside, no checkpoint sees which tensors a graph saves."""
    if hooks_on_saved() is None:
        return nullcontext()
    return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(t: Tensor) -> Tensor:
    return t


def unseen() -> AbstractContextManager[Any]:
    """Inside, a checkpoint does not see what dome computes for itself.

    A selective one keeps results, and would take dome's for the model's.
    """
    if hooks_on_saved() is None:
        return nullcontext()
    # 2.8 to 2.15; without it a selective checkpoint sees it all the same.
    disable = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
    context: AbstractContextManager[Any] = disable()
    return context


def _frame_of(caller: FrameType) -> Any | None:  # noqa: ANN401
    """The ``_CheckpointFrame`` of a running call of ``checkpoint()``."""
    region = caller.f_locals.get("gen")
    if region is None or region.gi_frame is None:
        return None  # it has not begun yet, or is over
    frame = region.gi_frame.f_locals.get("new_frame")
    if not isinstance(frame, checkpoint._CheckpointFrame):
        raise RuntimeError(_unknown_checkpoint())
    return frame


def _callers(*names: str) -> Iterator[FrameType]:
    """The functions of ``torch.utils.checkpoint`` that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in names and frame.f_globals is vars(checkpoint):
            yield frame
        frame = frame.f_back


def _unknown_checkpoint() -> str:
    return (
        f"activation checkpointing of torch {torch.__version__} is not known to dome: "
        "use a version of torch that the README's support table names, switch "
        'checkpointing off, or use samples="microbatch"'
    )
