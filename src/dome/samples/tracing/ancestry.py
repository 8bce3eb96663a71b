"""What autograd's graph tells about a tensor that no watched operation made."""

from collections.abc import Mapping

from torch import nn
from torch.autograd.graph import Node

# The autograd functions of the rules: a graph that holds one holds samples.
_RULES = "dome.samples.rules."


def ancestors(
    node: Node, tracked: Mapping[int, nn.Parameter]
) -> tuple[nn.Parameter, ...] | None:
    """The tracked parameters behind a graph; None if it holds captured samples.

    Args:
        node: Where the graph of the tensor starts.
        tracked: The parameters, by their ``id``.
    """
    seen, waiting = {node}, [node]
    found: dict[int, nn.Parameter] = {}
    while waiting:
        node = waiting.pop()
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and made_by.__module__.startswith(_RULES):
            return None
        leaf = id(getattr(node, "variable", None))
        if leaf in tracked:
            found[leaf] = tracked[leaf]
        fresh = {parent for parent, _ in node.next_functions if parent is not None}
        waiting += fresh - seen
        seen |= fresh
    return tuple(found.values())
