"""What autograd's graph tells about a tensor that was made outside the pass."""

from torch.autograd.graph import Node


def holds_captures(node: Node) -> bool:
    """Whether a graph contains operations that a rule ran: it holds samples then."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and made_by.__module__.startswith("dome.samples.rules."):
            return True
        fresh = {parent for parent, _ in node.next_functions if parent is not None}
        waiting += fresh - seen
        seen |= fresh
    return False
