"""One question a file, found by file name.

A question's module has a docstring whose first line is the question; ``Config`` (a
frozen dataclass) and ``SCALES`` with a configuration for "smoke" (tests), "quick",
"usual" and "full"; ``expected_seconds(config)``; ``compute(config, tell)``, which
returns rows of numbers; and ``table(rows)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from dome_lab.bench.run import Row, TextTable

HEADLINE = "step_cost"

Tell = Callable[[str, float], None]  # what is being done, and the share that is done


class Question(Protocol):
    """What the module of a question has."""

    SCALES: Mapping[str, Any]

    def expected_seconds(self, config: Any) -> float:  # noqa: ANN401 (its own Config)
        """About how long it takes."""

    def compute(self, config: Any, tell: Tell) -> list[Row]:  # noqa: ANN401 (as above)
        """The answer in numbers."""

    def table(self, rows: list[Row]) -> TextTable:
        """The answer in a table."""


def portion(tell: Tell, what: str, index: int, count: int) -> Callable[[float], None]:
    """What to tell in the course of part ``index`` of ``count`` equal ones."""

    def told(share: float) -> None:
        tell(what, (index + share) / count)

    told(0.0)
    return told


def question_names() -> list[str]:
    """All questions, the headline first."""
    names = [module.name for module in iter_modules(__path__)]
    return sorted(names, key=lambda name: (name != HEADLINE, name))


def load(name: str) -> Question:
    """The module of a question."""
    return cast("Question", import_module(f"{__name__}.{name}"))
