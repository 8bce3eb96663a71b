"""The command ``dome``, one command a file.

What a command needs is imported when it runs, not before: ``dome --help`` answers at
once.
"""

from __future__ import annotations

import gc
from importlib.metadata import version
from typing import Annotated

try:
    import rich  # noqa: F401 - asked here, so that its lack is told in one line
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"dome: {missing.name} is missing; install it with: "
        "pip install 'dome-torch[lab]'"
    ) from None

from dome_lab import interrupts
from dome_lab.cli import bench, demo, plan, report, reproduce, suggest, train
from dome_lab.cli.screen import OneLineErrors, console

__all__ = ["app", "main"]

app = typer.Typer(
    cls=OneLineErrors,
    help="Removes nuisance directions from stochastic gradients.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.command)
app.command("reproduce")(reproduce.command)
app.command("train")(train.command)
app.command("bench")(bench.command)
app.command("plan")(plan.command)
app.command("suggest")(suggest.command)
app.command("report")(report.command)


def main() -> None:
    """Run the command."""
    interrupts.install()
    try:
        app(prog_name="dome")
    except SystemExit as end:
        if end.code == interrupts.INTERRUPTED:
            interrupts.leave()
        interrupts.over()
        gc.freeze()  # Python would search all of torch for garbage: a third of a second
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"dome {version('dome-torch')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and stop.",
        ),
    ] = False,
) -> None:
    """Removes nuisance directions from stochastic gradients."""
    context.obj = debug
