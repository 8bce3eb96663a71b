"""Yes/no questions about data on a device, answered when nobody has to wait for it."""

from torch import Tensor

from dome.samples.store.reading import read


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
        waiting, self._open = self._open, []
        (answers,) = read([doubt for doubt, _ in waiting])
        for (answer,), (_, error) in zip(answers, waiting, strict=True):
            if answer:
                raise error

    def forget(self) -> None:
        """Drop what is open."""
        self._open = []
