"""One figure a file, found by file name: figNN_, tabNN_ and, beyond the paper, extNN_.

A figure's module has a docstring whose first line is the caption; ``Config`` (a frozen
dataclass whose defaults are the paper's values) and ``SCALES`` with a configuration for
"smoke" (seconds), "cpu" (real data, two cores) and "paper"; ``runs(config)``;
``compute_run(run)``, which yields rows; ``draw(rows)``; and ``judge(rows)``, a verdict
on each of the figure's claims.

A figure whose later runs depend on its first ones has ``later_runs(config, found)``
too: all runs that the finished ones call for, whether they are there already or not. It
is asked again whenever a run is over, and the figure is complete when all that was
asked for is there. One that asks several questions, each with runs of its own, has
``parts(config)``, a configuration for each: those that are computed are drawn and
judged while the others are not there yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dome_lab.paper.claims import Claim
    from dome_lab.paper.rows import Row
    from dome_lab.paper.run import Run

Found = Mapping["Run", Sequence["Row"]]  # the rows of finished runs
_NAME = re.compile(r"((?:fig|tab|ext)\d\d)_\w+")


class FigureModule(Protocol):
    """What the module of a figure has."""

    SCALES: Mapping[str, Any]

    def runs(self, config: Any) -> list[Run]:  # noqa: ANN401 (its own Config)
        """The runs the figure needs."""

    def compute_run(self, run: Run) -> Iterator[Row]:
        """The rows of one of them."""

    def draw(self, rows: Sequence[Row]) -> Figure:
        """The picture."""

    def judge(self, rows: Sequence[Row]) -> list[Claim]:
        """The verdicts."""


def runs_so_far(
    module: FigureModule,
    config: Any,  # noqa: ANN401 (its own Config)
    rows_of: Callable[[Run], Sequence[Row] | None],
) -> list[Run]:
    """All runs of a figure that can be told by now, those of later stages first.

    Later ones come first so that a question once begun is answered before the next.
    """
    first, later = module.runs(config), list["Run"]()
    later_runs = getattr(module, "later_runs", None)
    while later_runs is not None:
        known = dict.fromkeys([*later, *first])
        there = {run: rows for run in known if (rows := rows_of(run)) is not None}
        wanted = [run for run in later_runs(config, there) if run not in known]
        if not wanted:
            break
        later += dict.fromkeys(wanted)
    return list(dict.fromkeys([*later, *first]))


def figure_names() -> list[str]:
    """Full names of all figures, the paper's first."""
    found = [m.name for m in iter_modules(__path__) if _NAME.fullmatch(m.name)]
    return sorted(found, key=lambda name: (name.startswith("ext"), name))


def full_name(name: str) -> str:
    """The full name of a figure given by it or by its number, such as "fig03"."""
    known = figure_names()
    short = {short_name(full): full for full in known}
    if name in known or name in short:
        return short.get(name, name)
    near = get_close_matches(name, [*short, *known], n=1, cutoff=0)
    raise ValueError(
        f"no figure {name!r}: did you mean {near[0]!r}? There are: {', '.join(known)}"
    )


def short_name(full: str) -> str:
    """The number of a figure, such as "fig03"."""
    return full.partition("_")[0]


def load_figure(name: str) -> FigureModule:
    """The module of a figure, by full name or number."""
    return cast("FigureModule", import_module(f"{__name__}.{full_name(name)}"))


def caption(name: str) -> str:
    """First line of a figure's docstring, read without importing anything heavy."""
    source = Path(__path__[0], f"{full_name(name)}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.partition("\n")[0]
