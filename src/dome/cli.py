"""The command ``dome``. What a command needs is imported when it runs, not before."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"dome: {missing.name} is missing; install it with: "
        "pip install 'dome-torch[paper]'"
    ) from None

if TYPE_CHECKING:
    from rich.progress import Progress

    from dome.paper.demo import Config, Plan

BAD_USAGE, INTERRUPTED = 2, 130

app = typer.Typer(
    help="Removes nuisance directions from stochastic gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


class UserError(Exception):
    """A mistake in what the user asked for; the message says how to mend it."""


def main() -> None:
    """Run the command."""
    app(prog_name="dome")


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


@app.command()
def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for rows and picture.")] = Path(
        "dome-demo"
    ),
    seeds: Annotated[
        int | None, typer.Option(min=2, max=100, help="Repetitions, 3 by default.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Length of a run, 10 by default.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Directions to remove, 32 by default."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ten seconds; too short to show much.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not go on from the rows in the folder.")
    ] = False,
) -> None:
    """Train on digits with and without the filter, under ever harsher compression.

    Takes under two minutes on two cores and downloads nothing.
    Ctrl-C stops it, and the same command goes on where it stopped.
    """
    rows = out / "rows.jsonl"
    left = f"rows so far in {rows}; the same command goes on"
    with _one_line_errors(debug=bool(context.obj), left=left):
        _check_folder(out)
        from dome.paper import demo as experiment

        given = {"seeds": seeds, "epochs": epochs, "rank": rank}
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        usual = experiment.QUICK if quick else experiment.Config()
        config = replace(usual, **changes)
        plan = experiment.prepare(config, out, fresh=fresh)
        _announce(config, plan)
        _compute(plan)
        _conclude(plan.path)


def _announce(config: Config, plan: Plan) -> None:
    total = len(config.rates) * config.seeds * 2
    if plan.discarded:
        console.print("The settings changed: starting afresh.")
    elif not plan.missing:
        console.print("Every run is there already; --fresh computes them again.")
    elif len(plan.missing) < total:
        console.print(
            f"Going on: {total - len(plan.missing)} of {total} runs are there."
        )
    if plan.missing:
        console.print(
            f"Training ResNet-8 on digits, {len(plan.missing)} runs: "
            f"{len(config.rates)} compression rates, {config.seeds} seeds, with the "
            f"filter (rank {config.rank}) and without, {config.epochs} epoch(s) each."
        )


def _compute(plan: Plan) -> None:
    from dome.paper import demo as experiment
    from dome.report.demo_text import run_name

    work = sum(experiment.epoch_cost(run) * run.epochs for run in plan.missing)
    with _progress() as bar:
        task = bar.add_task("starting", total=work, visible=bool(plan.missing))
        for run, row in experiment.compute(plan):
            if row is not None:
                name = f"{run_name(run)}, epoch {row['epoch']}/{run.epochs}"
                bar.update(task, description=name, advance=experiment.epoch_cost(run))
        bar.update(task, description="done")


def _conclude(rows_path: Path) -> None:
    from dome.paper.comparison import compare
    from dome.paper.rows import read_rows
    from dome.report.demo_figure import draw, save
    from dome.report.demo_text import sentence, table

    rows = read_rows(rows_path)
    comparisons = compare(rows)
    picture = rows_path.with_name("demo.png")
    save(draw(rows, comparisons), picture)
    console.print(table(comparisons))
    console.print(sentence(comparisons))
    console.print(f"Picture: {picture}   rows: {rows_path}", soft_wrap=True)


@app.command()
def bench(
    context: typer.Context,
    questions: Annotated[
        list[str] | None, typer.Argument(help="Which to ask; all if none is named.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short; step_cost alone if none is named."),
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="Long; ResNet-18 too, which takes 16 GiB."),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for numbers, tables and pictures.")
    ] = Path("dome-bench"),
) -> None:
    """Measure what the filter costs on this machine.

    Questions: step_cost, compressors, growth, memory, parts, startup.
    """
    left = f"questions that were finished are in {out}"
    with _one_line_errors(debug=bool(context.obj), left=left):
        if quick and full:
            raise UserError("--quick and --full exclude each other")
        from dome.bench.questions import HEADLINE, question_names

        known = question_names()
        unknown = [name for name in questions or () if name not in known]
        if unknown:
            raise UserError(
                f"no question {unknown[0]!r}: choose from {', '.join(known)}"
            )
        _check_folder(out)
        names = questions or ([HEADLINE] if quick else known)
        scale = "quick" if quick else "full" if full else "usual"
        _ask(list(dict.fromkeys(names)), scale, out)


def _ask(names: list[str], scale: str, out: Path) -> None:
    from dome.bench import run

    with _progress() as bar:
        task = bar.add_task("starting", total=run.expected_seconds(names, scale))

        def tell(what: str, behind: float) -> None:
            bar.update(task, description=what, completed=behind)

        for answer in run.ask(names, scale, out, tell):
            console.print(answer.table.rich())
            for note in answer.table.notes:
                console.print(note)
            console.print("Files: " + ", ".join(map(str, answer.paths)), soft_wrap=True)


def _progress() -> Progress:
    from rich import progress

    return progress.Progress(
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        progress.TextColumn("{task.description}"),
        console=console,
    )


def _check_folder(out: Path) -> None:
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


@contextmanager
def _one_line_errors(*, debug: bool, left: str) -> Iterator[None]:
    """Turn what can go wrong into one line and an exit code; ``left`` by Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"stopped; {left}")
        raise typer.Exit(INTERRUPTED) from None
    except UserError as error:
        _fail(str(error), BAD_USAGE, debug)
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is missing: pip install 'dome-torch[paper]'", 1, debug)
    except (OSError, RuntimeError, ValueError) as error:
        _fail(f"{error} (dome --debug shows where)", 1, debug)


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        errors.print(traceback.format_exc(), markup=False)
    errors.print(f"dome: {message}", style="red", markup=False)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
