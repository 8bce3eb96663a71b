"""The sources of a basis that keep privacy: one file and one line in ``BASES``."""

from collections.abc import Callable
from typing import Any

from dome.privacy.bases.private import Private
from dome.privacy.bases.protocol import Basis, Nothing, Release, Setting
from dome.privacy.bases.public import Public
from dome.privacy.bases.released import Released
from dome.privacy.errors import PrivacyError

BASES: dict[str, Callable[[Setting], Basis]] = {
    "public": Public.made,
    "released": Released.made,
    "private": Private.made,
}

__all__ = [
    "BASES",
    "Basis",
    "Nothing",
    "Private",
    "Public",
    "Release",
    "Released",
    "Setting",
    "check_basis",
]


def check_basis(basis: Any) -> None:  # noqa: ANN401 (anything may be passed)
    """Refuse every source of a basis but the three that keep privacy."""
    if isinstance(basis, str) and basis in BASES:
        return
    raise PrivacyError(
        f"basis={basis!r}: a basis that private samples turn is itself a release of "
        f"them. What the filter removes shows it (the gradient has nothing left along "
        f"it), and no noise covers that, so that epsilon would be understated without "
        f"bound. Choose 'public' (a loader of public data), 'released' (past noised "
        f"gradients, free) or 'private' (noised power iterations, paid for jointly)"
    )
