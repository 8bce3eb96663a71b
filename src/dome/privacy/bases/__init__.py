"""The three sources of a basis that keep privacy, one a file."""

from dome.privacy.bases.private import Private
from dome.privacy.bases.protocol import BASES, Basis, Nothing, check_basis
from dome.privacy.bases.public import Public
from dome.privacy.bases.released import Released

__all__ = ["BASES", "Basis", "Nothing", "Private", "Public", "Released", "check_basis"]
