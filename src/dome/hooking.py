"""What is attached can be detached: hooks, and the context manager for them."""

from types import TracebackType
from typing import Self

from torch.utils.hooks import RemovableHandle


class Hooked:
    """Something that an optimizer calls before its step, until ``detach()``."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def step(self) -> None:
        """Filter ``.grad`` in place."""
        raise NotImplementedError

    @property
    def is_attached(self) -> bool:
        """Whether an optimizer calls this filter."""
        return bool(self._handles)

    def hook_into(self, handle: RemovableHandle) -> None:
        """Remember a hook that calls this filter, for ``detach`` to remove."""
        self._handles.append(handle)

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer. Can be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()
