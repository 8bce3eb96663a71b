"""``dome bench``: what the filter costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dome_lab import interrupts
from dome_lab.cli.screen import (
    UserError,
    check_folder,
    console,
    one_line_errors,
    users_values,
)
from dome_lab.interrupts import working


def command(
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
        typer.Option("--full", help="Long; ResNet-18 too, which takes 17 GB."),
    ] = False,
    device: Annotated[
        str, typer.Option(help='"cpu", or a GPU: "cuda", "cuda:1".')
    ] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for numbers and tables.")] = Path(
        "dome-bench"
    ),
) -> None:
    """Measure what the filter costs on this machine.

    Questions: step_cost, embeddings, alone, compressors, memory, plan, soak.
    """
    with one_line_errors(context, f"questions that were finished are in {out}"):
        if quick and full:
            raise UserError("--quick and --full exclude each other")
        from dome_lab.bench.questions import HEADLINE, question_names

        known = question_names()
        unknown = [name for name in questions or () if name not in known]
        if unknown:
            raise UserError(
                f"no question {unknown[0]!r}: choose from {', '.join(known)}"
            )
        _check_device(device)
        check_folder(out)
        names = questions or ([HEADLINE] if quick else known)
        with users_values():
            _check_files(names, out)
        scale = "quick" if quick else "full" if full else "usual"
        _ask(list(dict.fromkeys(names)), scale, out, device)


def _check_files(names: list[str], out: Path) -> None:
    """Find out now whether a file of others has a name that we need."""
    from dome_lab.paper.rows import check_own, is_answer

    for name in names:
        answer = out / f"{name}.json"
        check_own(answer, is_answer)
        check_own(answer.with_suffix(".md"), lambda _: answer.exists())  # noqa: B023


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise UserError(f'no device {device!r}: choose "cpu", "cuda" or "cuda:1"')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        raise UserError(
            f"torch {torch.__version__} sees {count or 'no'} CUDA device"
            f"{'' if count == 1 else 's'} here: nothing was measured"
        )


def _ask(names: list[str], scale: str, out: Path, device: str) -> None:
    from dome_lab.bench import run
    from dome_lab.cli.progress import simple_bar

    total = run.expected_seconds(names, scale)  # loads the questions, and torch
    with working(), simple_bar(total) as bar:
        task = bar.add_task("starting", total=total)

        def tell(what: str, behind: float) -> None:
            interrupts.check()
            bar.update(task, description=what, completed=behind)

        for answer in run.ask(names, scale, out, tell, device):
            console.print(answer.table.rich())
            for note in answer.table.notes:
                console.print(note)
            console.print("Files: " + ", ".join(map(str, answer.paths)), soft_wrap=True)
