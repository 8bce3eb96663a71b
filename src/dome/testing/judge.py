"""How a check fails: with a sentence, without pytest."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


def must(is_so: bool, words: str) -> None:
    """Raise ``AssertionError`` with these words if something is not so."""
    if not is_so:
        raise AssertionError(words)


def must_refuse(call: Callable[[], object], pattern: str) -> None:
    """Raise unless a call raises ``ValueError`` with words that fit."""
    try:
        call()
    except ValueError as error:
        fits = re.search(pattern, str(error)) is not None
        must(fits, f"the error should say {pattern!r}, it says {error}")
    else:
        raise AssertionError(f"should be refused: {pattern!r}")


def must_equal(one: object, other: object, words: str) -> None:
    """Raise unless tensors are the same, bit for bit."""
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from error


def reloaded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state after ``torch.save`` and ``torch.load(weights_only=True)``."""
    must(
        all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()),
        "state_dict() must hold tensors by name and nothing else",
    )
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


def run_all(
    checks: Sequence[Callable[[Callable[..., Made]], None]],
    make: Callable[..., Made],
) -> None:
    """Run checks one after the other; the one that fails is named."""
    for check in checks:
        try:
            check(make)
        except Exception as error:
            words = check.__name__.replace("_", " ")
            raise AssertionError(f"not so: {words}. {error}") from error
