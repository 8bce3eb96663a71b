"""What a careless training loop would lose, noticed: one danger a file."""

from dome.privacy.guards.batches import BatchGuard, Forward
from dome.privacy.guards.independence import check_independence
from dome.privacy.guards.inputs import InputGuard
from dome.privacy.guards.marks import Marks, marks_of
from dome.privacy.guards.parameters import ParameterGuard
from dome.privacy.guards.watch import Watch

__all__ = [
    "BatchGuard",
    "Forward",
    "InputGuard",
    "Marks",
    "ParameterGuard",
    "Watch",
    "check_independence",
    "marks_of",
]
