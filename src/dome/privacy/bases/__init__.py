"""The three sources of a basis that keep privacy, one a file."""

from dome.privacy.bases.private import Private
from dome.privacy.bases.protocol import BASES, Basis, Nothing, Release, check_basis
from dome.privacy.bases.public import Public
from dome.privacy.bases.released import Released

__all__ = [
    "BASES",
    "Basis",
    "Nothing",
    "Private",
    "Public",
    "Release",
    "Released",
    "check_basis",
]
