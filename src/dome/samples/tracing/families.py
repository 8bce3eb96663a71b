"""Families of operations that more than one rule asks about."""

from dome.samples.tracing.step import operations

ROLLING = frozenset(operations("roll"))
SORTING = frozenset(operations("sort", "argsort", "topk", "msort"))
SELECTING = frozenset(operations("index_select"))
ALONG = frozenset(operations("take_along_dim"))
SIZED = frozenset(operations("chunk", "split", "tensor_split", "split_with_sizes"))
SPLITTING = frozenset(operations("unbind", "unsafe_chunk", "unsafe_split"))
