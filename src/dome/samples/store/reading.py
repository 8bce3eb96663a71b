"""Small answers on a device, read at once: each read waits for all work before it.

Yes/no questions wait until somebody has to wait for the device anyway.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def read(*answers: Sequence[Tensor]) -> list[list[list[float]]]:
    """Lists of small tensors as lists of lists of numbers, for one wait in all."""
    flat = [t.reshape(-1) for some in answers for t in some]
    if not flat:
        return [[] for _ in answers]
    kind = reduce(torch.promote_types, (t.dtype for t in flat))
    numbers = iter(torch.cat([t.to(kind) for t in flat]).tolist())
    return [
        [[next(numbers) for _ in range(t.numel())] for t in some] for some in answers
    ]


class Questions:
    """Errors that depend on the device, raised at once where that costs no wait."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, RuntimeError]] = []

    def raise_if(self, doubt: Tensor | None, error: RuntimeError) -> None:
        """Raise an error if a doubt (0-dimensional) is true, now or in ``answer``."""
        if doubt is None:
            return
        if doubt.device.type != "cpu":
            self._open.append((doubt, error))
        elif doubt:
            raise error

    def answer(self) -> None:
        """Raise the first open error whose doubt is true."""
        if not self._open:
            return
        waiting, self._open = self._open, []
        (answers,) = read([doubt for doubt, _ in waiting])
        for (answer,), (_, error) in zip(answers, waiting, strict=True):
            if answer:
                raise error

    def forget(self) -> None:
        """Drop what is open."""
        self._open = []
