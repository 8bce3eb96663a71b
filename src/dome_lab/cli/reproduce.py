"""``dome reproduce``: figures of the paper, computed, drawn and judged."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dome_lab.cli.screen import (
    HOUR,
    DataDir,
    UserError,
    check_folder,
    console,
    duration,
    kept_states,
    one_line_errors,
    show_path,
    use_data,
    users_values,
)
from dome_lab.interrupts import working

if TYPE_CHECKING:
    from dome_lab.paper.cost import TimeLeft
    from dome_lab.paper.figures import FigureModule
    from dome_lab.paper.jobs import Job
    from dome_lab.paper.reproduce import Conclusion, Plan

SCALES = ("smoke", "cpu", "full", "paper")
ALL = "all"
LEAST_HOURS = 0.05  # less would be told as 0.0 h


def command(
    context: typer.Context,
    figures: Annotated[
        list[str] | None,
        typer.Argument(help="Such as fig03; or all. --list shows what there is."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: seconds, on digits. cpu: real data, small. full: the paper's "
            "runs with fewer seeds, hours to days. paper: all of it, for a GPU."
        ),
    ] = "cpu",
    out: Annotated[
        Path, typer.Option(help="Folder for rows, figures and verdicts.")
    ] = Path("dome-results"),
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; one per core by default."),
    ] = None,
    data_dir: DataDir = None,
    list_: Annotated[bool, typer.Option("--list", help="Show what there is.")] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Draw from the rows; compute nothing.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask, however long it takes.")
    ] = False,
) -> None:
    """Compute figures of the paper, draw them, and judge the paper's claims.

    Ctrl-C stops it, and the same command resumes after the last whole epoch. Several
    commands may share one folder: no run is computed twice.
    """
    left = f"what is finished is in {out}; the same command goes on"
    with one_line_errors(context, left, lambda: kept_states(out.glob("*/*.state"))):
        with users_values():
            names = _names(figures or [], scale, listing=list_)
            modules = {} if list_ else _modules(names, scale, figures or [])
        if list_:
            _show_list(names)
            return
        check_folder(out)
        use_data(data_dir)
        from dome_lab.paper.reproduce import make_plan

        folder = out / scale
        folder.mkdir(exist_ok=True)
        with users_values():
            _check_files(names, folder)
        with working():
            plan = make_plan(modules, scale, folder)
            if draw_only:
                _draw(plan)
            else:
                _run(plan, scale, processes or _default_processes(), yes=yes)


def _check_files(names: list[str], folder: Path) -> None:
    """Find out now whether a file of others has a name that we need."""
    from dome_lab.paper import rows as outputs
    from dome_lab.paper.reproduce import CLAIMS_FILE, PICTURES
    from dome_lab.paper.rows import meta_path
    from dome_lab.report.page import REPORT_FILE

    outputs.check_own(folder / REPORT_FILE, outputs.is_page)
    outputs.check_own(folder / CLAIMS_FILE, outputs.is_claims)
    for name in names:
        rows = folder / f"{name}.jsonl"
        outputs.check_own(meta_path(rows), outputs.is_noted)
        for kind in PICTURES:
            outputs.check_own(rows.with_suffix(f".{kind}"), outputs.is_picture)


def _run(plan: Plan, scale: str, num_workers: int, *, yes: bool) -> None:
    started = time.perf_counter()
    if plan.missing:
        _prepare(plan, scale, num_workers, yes=yes)
    _show_conclusions(_compute(plan, num_workers), plan)
    console.print(f"This took {duration(time.perf_counter() - started)}.")


def _names(figures: list[str], scale: str, *, listing: bool) -> list[str]:
    from dome_lab.paper.figures import figure_names, full_name
    from dome_lab.paper.run import check_name

    check_name("scale", scale, SCALES)
    if ALL in figures or (listing and not figures):
        return figure_names()
    if not figures:
        raise UserError(
            "which figure? Name some, or all; dome reproduce --list shows them"
        )
    return list(dict.fromkeys(full_name(name) for name in figures))


def _modules(names: list[str], scale: str, asked: list[str]) -> dict[str, FigureModule]:
    """Those that have the scale; one that was asked for and has not is refused."""
    from dome_lab.paper.figures import load_figure, short_name

    modules = {name: load_figure(name) for name in names}
    for name, module in modules.items():
        if scale not in module.SCALES and ALL not in asked:
            there = ", ".join(module.SCALES)
            raise UserError(
                f"{short_name(name)} has no scale {scale!r}: choose from {there}"
            )
    return {name: m for name, m in modules.items() if scale in m.SCALES}


def _show_list(names: list[str]) -> None:
    from dome_lab.paper.figures import caption, load_figure, short_name
    from dome_lab.report.claims import figure_table

    captions = {short_name(name): caption(name) for name in names}
    numbers = {
        short_name(name): [
            _runs_and_hours(load_figure(name), scale) for scale in SCALES
        ]
        for name in names
    }
    console.print(figure_table(captions, SCALES, numbers))
    console.print(
        "Runs, and seconds or hours of one core, estimated from earlier runs; with a "
        "+ more runs follow from the first."
    )
    console.print("dome reproduce FIGURE ... --scale cpu, or: dome reproduce all")


def _runs_and_hours(module: FigureModule, scale: str) -> str:
    from dome_lab.paper.cost import guessed_seconds

    if scale not in module.SCALES:
        return "-"
    runs = module.runs(module.SCALES[scale])
    seconds = sum(map(guessed_seconds, runs))
    # Of a figure with stages only the first one's runs are known beforehand.
    more = "+" if hasattr(module, "later_runs") else ""
    is_short = seconds < LEAST_HOURS * HOUR
    cost = (
        f"{math.ceil(seconds)}{more} s"
        if is_short
        else f"{seconds / HOUR:,.1f}{more} h"
    )
    return f"{len(runs)}{more}\n{cost}"


def _default_processes() -> int:
    """One run a core; a GPU is given one run at a time."""
    from dome_lab.paper.device import training_device
    from dome_lab.paper.workers import available_cores

    return available_cores() if training_device().type == "cpu" else 1


def _prepare(plan: Plan, scale: str, num_workers: int, *, yes: bool) -> None:
    """Everything that can stop a long computation before it begins."""
    from dome_lab.paper.device import training_device
    from dome_lab.paper.reproduce import read_samples

    total = len({job.key for figure in plan.figures for job in figure.jobs})
    there = total - len(plan.missing)
    if there:
        states = kept_states(plan.figures[0].folder.glob("*.state"))
        console.print(f"Going on: {there} of {total} runs are there{states}.")
    long = scale == "paper" and training_device().type == "cpu"
    if long and not yes and not _has_terminal():
        raise UserError(
            "the paper's settings take days without a GPU, and there is nobody to "
            "ask: add --yes, or --scale cpu"
        )
    with console.status("Reading the samples ...") as status:
        for samples in read_samples(plan):
            status.update(f"Reading the samples ... {samples} is there.")
    seconds = _time_left(plan, num_workers).seconds
    console.print(
        f"{len(plan.missing)} runs, {num_workers} at a time: about "
        f"{duration(seconds)}, corrected as epochs end."
    )
    if long and not yes and not typer.confirm("Start?"):
        raise UserError("not started")


def _time_left(plan: Plan, num_workers: int) -> TimeLeft:
    from dome_lab.paper.cost import TimeLeft

    time_left = TimeLeft([job.key for job in plan.missing], num_workers)
    time_left.learn_from(plan.found)
    return time_left


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _compute(plan: Plan, num_workers: int) -> list[Conclusion]:
    """Compute what is missing; draw each figure as soon as it has all its runs."""
    from dome_lab.cli.progress import followed
    from dome_lab.paper.reproduce import compute, conclude

    waiting = list(plan.figures)
    done: list[Conclusion] = []

    def draw_ready() -> None:
        for figure in [f for f in waiting if not f.num_missing(plan.found)]:
            waiting.remove(figure)
            done.append(conclude(figure, plan.found))
            console.print(f"{figure.name}: {done[-1].pictures[0]}", soft_wrap=True)

    if plan.missing:
        time_left = _time_left(plan, num_workers)
        for event in followed(compute(plan, num_workers), time_left):
            if event.stored:
                _log(event.job, time_left)
                draw_ready()
    draw_ready()
    return done


def _log(job: Job, time_left: TimeLeft) -> None:
    """A line for each run where no progress bar is seen, such as in a file."""
    if not console.is_terminal:
        left = duration(time_left.seconds)
        console.print(f"{job}: stored; about {left} left.", soft_wrap=True)


def _draw(plan: Plan) -> None:
    from dome_lab.paper.figures import short_name
    from dome_lab.paper.reproduce import conclude

    ready = [f for f in plan.figures if f.parts(plan.found).num_ready]
    _show_conclusions([conclude(figure, plan.found) for figure in ready], plan)
    lacking = [
        f"{figure.num_missing(plan.found)} of {len(figure.jobs)} for "
        f"{short_name(figure.name)}"
        for figure in plan.figures
        if figure not in ready
    ]
    if lacking:
        raise UserError(
            f"runs are missing, {', '.join(lacking)}: compute them without --draw-only"
        )


def _show_conclusions(conclusions: list[Conclusion], plan: Plan) -> None:
    from dome_lab.paper.reproduce import CLAIMS_FILE
    from dome_lab.report.claims import claims_table, summary

    if not conclusions:
        return
    order = [figure.name for figure in plan.figures]
    conclusions.sort(key=lambda conclusion: order.index(conclusion.name))
    claims = [claim for conclusion in conclusions for claim in conclusion.claims]
    console.print(claims_table(claims))
    console.print(summary(claims))
    for conclusion in conclusions:
        console.print(
            f"{conclusion.name}: {', '.join(map(str, conclusion.pictures))} "
            f"({duration(conclusion.seconds)} of computing)",
            soft_wrap=True,
        )
        for note in conclusion.parts.notes:
            console.print(f"{conclusion.name}: {note}")
    console.print(f"Verdicts: {plan.figures[0].folder / CLAIMS_FILE}", soft_wrap=True)
    _write_report(plan.figures[0].folder, plan.figures[0].scale)


def _write_report(folder: Path, scale: str) -> None:
    from dome_lab.paper.lock import PATIENCE, locked
    from dome_lab.report.page import REPORT_FILE, write_report
    from dome_lab.report.sections import figure_sections

    page = folder / REPORT_FILE
    title = f"dome reproduce: the paper's figures at scale {scale}"
    sections = figure_sections(folder, scale)
    with locked(folder, patience=PATIENCE):
        write_report(page, title, sections)
    show_path(page)
