"""What all commands share: the terminal, errors in one line, checks of folders."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from dome_lab import interrupts
from dome_lab.interrupts import INTERRUPTED

BAD_USAGE = 2
MINUTE, HOUR, DAY = 60, 3600, 86400

DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of data sets; DOME_DATA, else the Hub, by default."),
]

# Without markup: paths and names may have brackets.
console = Console(highlight=False, markup=False)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

# Where typer keeps its UsageError depends on the version.
_UsageError: Any = typer.BadParameter.__bases__[0]


class UserError(Exception):
    """A mistake in what the user asked for; the message says how to mend it."""


class OneLineErrors(TyperGroup):
    """The group of commands; a wrong option is one line, not a box of seven."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as typer's own
        """Run the command given, and leave with its exit code."""
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except _UsageError as error:
            if type(error).show is not _UsageError.show:
                error.show()  # not an error to type nothing: this shows the help
            else:
                show_error(error.format_message())
            code = BAD_USAGE
        except typer.Abort:
            errors.print("stopped")
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def one_line_errors(
    context: typer.Context, left: str, kept: Callable[[], str] = str
) -> Iterator[None]:
    """Turn what can go wrong into one line and an exit code.

    Args:
        context: Of the command.
        left: What Ctrl-C leaves, in words.
        kept: Tells what else it leaves, once it was pressed.
    """
    debug = bool(context.obj)
    try:
        with _stopped(left, kept):
            yield
    except typer.Exit:  # a RuntimeError, of all things
        raise
    except UserError as error:
        _fail(str(error), BAD_USAGE, debug)
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is missing: pip install 'dome-torch[lab]'", 1, debug)
    except (OSError, RuntimeError, ValueError) as error:
        _fail(f"{error} (dome --debug shows where)", 1, debug)


@contextmanager
def _stopped(left: str, kept: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # A press that was dropped in the middle of an import may come as anything.
        if not (isinstance(error, KeyboardInterrupt) or interrupts.is_pending()):
            raise
        interrupts.arrived()
        errors.print(f"stopped; {left}{kept()}")
        raise typer.Exit(INTERRUPTED) from None


def use_data(folder: Path | None) -> None:
    """Tell what loads samples, in all processes, where they are."""
    if folder is not None:
        os.environ["DOME_DATA"] = str(folder)


@contextmanager
def users_values() -> Iterator[None]:
    """What is refused inside is a mistake in what the user gave."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def show_error(message: str) -> None:
    """Print a message in one line, as errors are."""
    errors.print(f"dome: {' '.join(message.split())}", style="red")


def tell(notes: Iterable[str]) -> None:
    """Print what was found and is no error, a line each."""
    for note in notes:
        errors.print(f"dome: {note}", style="yellow")


def check_folder(out: Path) -> None:
    """Make the folder and find out now, not after a minute, whether it takes files."""
    if out.is_file():
        raise UserError(f"--out {out} is a file: give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        why = error.strerror
        raise UserError(f"--out {out} cannot be written to: {why}") from error


def kept_states(paths: Iterable[Path]) -> str:
    """What states of runs that are not finished take on disk; empty if none is."""
    sizes = [path.stat().st_size for path in paths]
    if not sizes:
        return ""
    return f"; {len(sizes)} kept .state, {sum(sizes) / 1e6:,.1f} MB, removed when done"


def show_path(page: Path) -> None:
    """Say where a report is."""
    console.print(f"Report: {page}", soft_wrap=True)


def duration(seconds: float) -> str:
    """A time in two units at most, as one says it."""
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    if seconds < HOUR:
        return f"{seconds / MINUTE:.0f} min"
    if seconds < 2 * DAY:
        return f"{seconds // HOUR:.0f} h {seconds % HOUR / MINUTE:02.0f} min"
    return f"{seconds / DAY:,.0f} days"


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        errors.print(traceback.format_exc())
    show_error(message)
    raise typer.Exit(code)
