"""Parameters change by steps that were paid for, and by nothing else.

An optimizer that was made anew, a second one, or a line such as ``p.data -= lr *
p.grad`` trains on raw gradients without anybody being asked. So the values themselves
are compared with those that the last paid step has left. That takes a copy of the
trainable parameters (D,), a B-th of what the samples (B, D) take.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dome.parameters import Layout, has_numbers
from dome.privacy.accounting import PrivacyError
from dome.privacy.sampling import digest
from dome.torch_private import version_of

VALUES = "values"


class ParameterGuard:
    """Notices parameters that changed without a step that was paid for.

    Args:
        model: Its frozen parameters are watched by their version, which any operation
            in place raises: no gradient reaches them.
        layout: The trainable parameters, which are watched by value.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._frozen = {
            name: p
            for name, p in model.named_parameters()
            if id(p) not in layout.slot_of
        }
        self._free = self._open = False
        # Of a state that was loaded: what the parameters have to be.
        self._expected: int | None = None
        self.accept()

    @torch.no_grad()
    def accept(self) -> None:
        """Take the parameters as they are."""
        self._open, self._expected = False, None
        self._paid = self._values()
        self._versions = {name: version_of(p) for name, p in self._frozen.items()}

    def open(self) -> None:
        """Let parameters change until ``settle``: a paid gradient is in ``.grad``."""
        self._open = True

    def settle(self) -> None:
        """Take what a paid step has made of the parameters."""
        if self._open:
            self.accept()

    @torch.no_grad()
    def check(self) -> None:
        """Refuse parameters that something else than a paid step has changed."""
        if self._free:
            return
        # What a step that broke off has changed is paid for, too.
        self.settle()
        values = self._values()
        if self._expected is not None:
            if digest(values) != self._expected:
                raise PrivacyError(
                    "the parameters are not those that were saved with the loaded "
                    "state, but its epsilon is for those: load the model's state that "
                    "was saved with it; put changes that cost nothing into "
                    ".public_changes()"
                )
            self.accept()
        changed = self._changed(values)
        if changed is not None:
            raise PrivacyError(
                f"parameter {changed!r} changed without a step that was paid for: by "
                "another optimizer than the attached one (was it made anew?), or by "
                "hand. Its cost is not known and epsilon would be too low. Attach the "
                "optimizer that trains, before its first step; put changes from "
                "public data or from earlier steps into .public_changes()"
            )

    @contextmanager
    def public_changes(self) -> Iterator[None]:
        """Take what happens inside on the user's word."""
        self.check()
        self._free = True
        try:
            yield
        finally:
            self._free = False
        self.accept()

    def state_dict(self) -> dict[str, Tensor]:
        """A digest of the parameters, by which they are known again."""
        return {VALUES: torch.tensor(digest(self._values()))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """From now on the parameters have to be those of the state."""
        self._expected = int(state[VALUES])

    def _values(self) -> Tensor:
        # As one vector, so that a device is asked once.
        return torch.cat([p.detach().reshape(-1) for p in self._layout.parameters])

    def _changed(self, values: Tensor) -> str | None:
        """The first parameter that is not as it was, by name."""
        for name, p in self._frozen.items():
            if version_of(p) != self._versions[name]:
                return name
        if _same(values, self._paid):
            return None
        for slot in self._layout.slots:
            columns = slice(slot.start, slot.stop)
            if not _same(values[columns], self._paid[columns]):
                return slot.name
        return self._layout.slots[0].name


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors hold the same numbers; NaN is one."""
    if a.device != b.device:  # the model was moved, which changes no value
        a, b = a.cpu(), b.cpu()
    return torch.equal(a, b) or (
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def check_parameters(optimizer: Optimizer, layout: Layout, model: nn.Module) -> None:
    """Refuse a parameter that would be trained without noise."""
    tracked = {id(p) for p in layout.parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p for p in held if has_numbers(p)]
    if any(p.requires_grad and id(p) not in tracked for p in held):
        raise PrivacyError(
            "the optimizer trains a parameter that is not in the model, or was added "
            "or unfrozen after attach: it would get a gradient without noise. Freeze "
            "it, or attach again"
        )
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in tracked and has_numbers(p):
            raise PrivacyError(
                f"parameter {name!r} can be trained, but not by this optimizer: its "
                f"gradient would have no noise. Give it to the optimizer or freeze it"
            )
