"""One rule for each operation in which samples meet a parameter, in one table.

A rule is called as ``rule(trace, call, *args, **kwargs)`` with the operation's own
arguments and returns the operation's own result. An operation that has none is run for
each sample by vmap: ``fallback``.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from dome.samples.rules.attention import attention
from dome.samples.rules.broadcast import assign, broadcast, concatenate
from dome.samples.rules.cell import gru_cell, lstm_cell, rnn_cell
from dome.samples.rules.conv import conv, conv_transpose
from dome.samples.rules.embedding import embedding, embedding_bag, lookup
from dome.samples.rules.fallback import fallback
from dome.samples.rules.grouped import grouped_mm
from dome.samples.rules.linear import addmm, baddbmm, linear, matmul
from dome.samples.rules.masked import masked_scatter
from dome.samples.rules.norm import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from dome.samples.rules.recording import RECORDED
from dome.samples.rules.recurrent import gru, lstm, rnn
from dome.samples.tracing.nested import Value, is_dense
from dome.samples.tracing.origins import BROADCASTING, Call, operations
from dome.samples.tracing.trace import Trace
from dome.torch_private import fused

__all__ = ["ALWAYS", "LIKE", "PASSIVE", "QUESTIONS", "RULES", "rule_for"]

Rule = Callable[..., Value]

RULES: dict[Callable[..., Value], Rule] = {
    F.linear: linear,
    F.conv1d: conv,
    F.conv2d: conv,
    F.conv3d: conv,
    F.conv_transpose1d: conv_transpose,
    F.conv_transpose2d: conv_transpose,
    F.conv_transpose3d: conv_transpose,
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.multi_head_attention_forward: attention,
    fused.lstm: lstm,
    fused.gru: gru,
    fused.rnn_tanh: rnn,
    fused.rnn_relu: rnn,
    fused.lstm_cell: lstm_cell,
    fused.gru_cell: gru_cell,
    fused.rnn_tanh_cell: rnn_cell,
    fused.rnn_relu_cell: rnn_cell,
    torch.Tensor.__setitem__: assign,
    torch.Tensor.__getitem__: lookup,
    **dict.fromkeys(operations("index_select"), lookup),
    **dict.fromkeys(operations("grouped_mm", "_grouped_mm"), grouped_mm),
    **dict.fromkeys(operations("matmul", "mm", "bmm", "__matmul__"), matmul),
    **dict.fromkeys(operations("addmm"), addmm),
    **dict.fromkeys(operations("cat", "concat", "concatenate", "stack"), concatenate),
    **dict.fromkeys(operations("baddbmm"), baddbmm),
    **dict.fromkeys(operations("masked_scatter", "masked_scatter_"), masked_scatter),
    F.scaled_dot_product_attention: broadcast,
    **dict.fromkeys(BROADCASTING, broadcast),
}


def rule_for(trace: Trace, call: Call) -> Rule:
    """The rule by which samples meet weights in an operation.

    Derivatives of complex numbers are left to autograd: rules that have a backward of
    their own would need the conjugate.
    """
    is_complex = False
    for t in (*call.batched, *call.derived):
        if not is_dense(t):
            problem = f"a tensor of layout {t.layout}, which is not dense, is in it"
            raise trace.lost(problem, *call.derived)
        is_complex = is_complex or t.is_complex()
    rule = RULES.get(call.func, fallback)
    return fallback if is_complex and rule not in RECORDED else rule


def _getters(*names: str) -> Iterator[Callable[..., Value]]:
    return (getattr(torch.Tensor, name).__get__ for name in names)


# These run their rule even if no parameter of theirs is tracked: they may mix samples.
ALWAYS = frozenset([F.batch_norm])

# A shape or a type is all that these take from any argument but the first.
LIKE = frozenset(
    operations("type_as", "expand_as", "view_as", "reshape_as", "to", "new_tensor")
)
# Samples and parameters may meet here: nothing of them is in the result.
PASSIVE = frozenset(
    operations(
        *(
            "is_same_size",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "__eq__",
            "__ne__",
            "__lt__",
            "__le__",
        ),
        *("__gt__", "__ge__", "isclose", "allclose", "equal"),
    )
)


# Asked all the time, answered without a tensor: not worth looking at the arguments.
QUESTIONS = frozenset(
    [
        *operations("size", "dim", "numel", "stride", "is_floating_point", "__len__"),
        *operations("is_contiguous", "get_device", "is_complex", "data_ptr"),
        *_getters("shape", "ndim", "dtype", "device", "layout", "requires_grad"),
        *_getters("is_leaf", "grad_fn", "is_nested", "is_cuda", "is_sparse"),
    ]
)
