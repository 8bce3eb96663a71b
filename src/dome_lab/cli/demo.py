"""``dome demo``: what the filter does, on digits, in two minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dome_lab.cli.screen import (
    check_folder,
    console,
    kept_states,
    one_line_errors,
    show_path,
    users_values,
)
from dome_lab.interrupts import working

if TYPE_CHECKING:
    from dome_lab.paper.demo import Plan

DEMO_LOCK = ".demo.lock"  # the folder's own is for the moments of writing rows
PICTURE = "demo.png"


def command(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="Folder for rows, picture and report.")
    ] = Path("dome-demo"),
    seeds: Annotated[
        int | None, typer.Option(min=3, max=100, help="Repetitions, 3 by default.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Length of a run, 10 by default.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Directions to remove, 32 by default."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Some seconds; too short to show much.")
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
    with one_line_errors(context, left, lambda: kept_states(out.glob("*.state"))):
        check_folder(out)
        from dome_lab.paper import demo as experiment
        from dome_lab.paper.lock import locked
        from dome_lab.paper.rows import check_own, is_page, is_picture
        from dome_lab.report.page import REPORT_FILE

        with users_values():
            check_own(out / PICTURE, is_picture)
            check_own(out / REPORT_FILE, is_page)

        given = {"seeds": seeds, "epochs": epochs, "rank": rank}
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        usual = experiment.QUICK if quick else experiment.Config()
        with working(), locked(out, DEMO_LOCK):
            with users_values():
                plan = experiment.prepare(replace(usual, **changes), out, fresh=fresh)
            _announce(plan)
            _compute(plan)
            _conclude(plan)


def _announce(plan: Plan) -> None:
    config, total, missing = plan.config, len(plan.jobs), len(plan.missing)
    if not missing:
        console.print("Every run is there already; --fresh computes them again.")
        return
    if missing < total:
        console.print(f"Going on: {total - missing} of {total} runs are there.")
    console.print(
        f"Training ResNet-8 on digits, {missing} runs: "
        f"{len(config.rates)} compression rates, {config.seeds} seeds, with the "
        f"filter (rank {config.rank}) and without, {config.epochs} epoch(s) each."
    )


def _compute(plan: Plan) -> None:
    from dome_lab.cli.progress import followed
    from dome_lab.paper import demo as experiment
    from dome_lab.paper.cost import TimeLeft
    from dome_lab.paper.workers import available_cores

    if plan.missing:
        cores = available_cores()
        time_left = TimeLeft([job.key for job in plan.missing], cores)
        for _ in followed(experiment.compute(plan, cores), time_left):
            pass


def _conclude(plan: Plan) -> None:
    from dome_lab.paper.comparison import compare
    from dome_lab.paper.drawing import save_picture
    from dome_lab.report.demo_figure import draw
    from dome_lab.report.demo_text import sentence, table
    from dome_lab.report.page import REPORT_FILE, write_report
    from dome_lab.report.sections import demo_section

    comparisons = compare(plan.rows)
    picture = plan.path.with_name(PICTURE)
    save_picture(draw(plan.rows, comparisons), picture)
    console.print(table(comparisons))
    console.print(sentence(comparisons))
    console.print(f"Picture: {picture}   rows: {plan.path}", soft_wrap=True)
    page = plan.path.with_name(REPORT_FILE)
    write_report(page, "dome demo: does the filter help here?", [demo_section(plan)])
    show_path(page)
