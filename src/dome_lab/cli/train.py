"""``dome train``: one run of the experiments, with any setting."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dome_lab import interrupts
from dome_lab.cli.screen import (
    DataDir,
    UserError,
    check_folder,
    console,
    kept_states,
    one_line_errors,
    tell,
    use_data,
    users_values,
)
from dome_lab.interrupts import working

if TYPE_CHECKING:
    from dome_lab.paper.jobs import StateFile
    from dome_lab.paper.rows import Row
    from dome_lab.paper.run import Run

# Heading, column of the row, and how a number is written.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("epoch", "epoch", "{:.0f}".format),
    ("train loss", "train_loss", "{:.4f}".format),
    ("test loss", "test_loss", "{:.4f}".format),
    ("accuracy", "test_accuracy", "{:.2%}".format),
    ("macro-F1", "test_macro_f1", "{:.4f}".format),
    ("norm kept", "kept_norm", "{:.3f}".format),
    ("fraction", "fraction", "{:.3f}".format),
    ("seconds", "seconds", "{:.1f}".format),
)


def _line(row: Row) -> str:
    """A row, under the headings; a dash for what is not a number."""
    values = ((title, row[column], write) for title, column, write in _COLUMNS)
    return "  ".join(
        (write(v) if isinstance(v, int | float) else "-").rjust(len(title))
        for title, v, write in values
    )


def command(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Option(
            help="digits, mnist, cifar10, tiny_imagenet, dbpedia or made_text."
        ),
    ] = "digits",
    model: Annotated[
        str, typer.Option(help="resnet8, resnet18 or transformer.")
    ] = "resnet8",
    optimizer: Annotated[
        str,
        typer.Option(
            help="sgd, adam, or ema: the paper's averaging momentum, whose steps are "
            "1 - momentum times sgd's."
        ),
    ] = "adam",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    momentum: Annotated[float, typer.Option(help="Of sgd and ema.")] = 0.0,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Samples a step.")] = 128,
    seed: Annotated[
        int, typer.Option(help="Of weights, order, noise and first basis.")
    ] = 0,
    num_train: Annotated[
        int | None, typer.Option(help="Training samples; all by default.")
    ] = None,
    num_test: Annotated[
        int | None, typer.Option(help="Test samples; all by default.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="The first classes only; all by default.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Directions to track; no filter by default.")
    ] = None,
    removes: Annotated[
        str,
        typer.Option(
            help="Of the gradient: the tracked span, the rest, nothing (watch only), "
            "or uncoded (the span is sent exactly beside the sketch of the rest); or "
            "the leading eigenvectors of the hessian."
        ),
    ] = "span",
    rate: Annotated[
        float | None,
        typer.Option(help="Compress so many times; no compression by default."),
    ] = None,
    compressor: Annotated[
        str,
        typer.Option(
            help="gaussian, hadamard, randomk, terngrad, qsgd, or with error feedback: "
            "randomk+feedback, topk+feedback, signsgd+feedback, powersgd+feedback."
        ),
    ] = "gaussian",
    tracker: Annotated[str, typer.Option(help="power or svd.")] = "power",
    forget: Annotated[
        float | None,
        typer.Option(help="Weight of the newest batch; averages all by default."),
    ] = None,
    update_every: Annotated[
        int, typer.Option(help="Steps between updates of the basis.")
    ] = 1,
    layout: Annotated[str, typer.Option(help="global or layerwise.")] = "global",
    oversample: Annotated[
        int, typer.Option(help="Directions tracked beyond those removed.")
    ] = 0,
    direction_rank: Annotated[
        int | None,
        typer.Option(help="Rank of a direction in each weight; as it is by default."),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="File (JSON lines) to add the rows to.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(min=1, help="More are faster; the last digits depend on them."),
    ] = 1,
) -> None:
    """Train once and show every epoch.

    The same settings give the same rows as they do in the figures of dome reproduce.
    With --out, Ctrl-C keeps whole epochs, and the same command goes on behind them.
    """
    left = "nothing of the run is kept: with --out whole epochs are"
    if out is not None:
        left = f"whole epochs are kept beside {out}; the same command goes on"
    with one_line_errors(context, left, lambda: _kept(out)):
        use_data(data_dir)
        import torch

        from dome_lab.paper.run import Run
        from dome_lab.paper.workers import keep_what_steps_free

        keep_what_steps_free()
        torch.set_num_threads(threads)
        with users_values():
            run = Run(
                task=task,
                model=model,
                seed=seed,
                batch_size=batch_size,
                epochs=epochs,
                optimizer=optimizer,
                lr=lr,
                momentum=momentum,
                num_train=num_train,
                num_test=num_test,
                num_classes=num_classes,
                rank=rank,
                removes=removes,
                rate=rate,
                compressor=compressor,
                tracker=tracker,
                forget=forget,
                update_every=update_every,
                layout=layout,
                oversample=oversample,
                direction_rank=direction_rank,
            )
        _check_file(out)
        with working():
            _train(run, out)


def _kept(out: Path | None) -> str:
    return kept_states(out.parent.glob(f"{out.name}.*.state")) if out else ""


def _train(run: Run, out: Path | None) -> None:
    from dome_lab.paper.jobs import StateFile
    from dome_lab.paper.lock import locked

    if out is None:
        _rows(run, None)
        return
    if (found := _stored(run, out)) is not None:
        console.print(f"{run}: is in {out} already.", soft_wrap=True)
        _show(found)
        _state_path(run, out).unlink(missing_ok=True)  # stored, and then killed
        return
    state = StateFile(_state_path(run, out))
    # Other runs may be trained into the same file meanwhile, the same one may not.
    with locked(out.parent, f".{state.path.name}.lock"):
        if state.note:
            tell([f"{state.path.name} {state.note}: the run begins anew"])
        rows = _rows(run, state)
        _store(rows, out)
        state.remove()
    console.print(f"Rows: {out}", soft_wrap=True)


def _state_path(run: Run, out: Path) -> Path:
    from dome_lab.paper.jobs import digest_of
    from dome_lab.paper.rows import TRAINING

    return out.with_name(f"{out.name}.{digest_of((TRAINING, run))}.state")


def _stored(run: Run, out: Path) -> list[Row] | None:
    """The rows of the run if it is in the file, which is mended first."""
    from dome_lab.paper.lock import PATIENCE, locked
    from dome_lab.paper.rows import TRAINING, mend, read_runs

    with locked(out.parent, patience=PATIENCE), users_values():
        mend(out)
    return read_runs([out]).get((TRAINING, run))


def _store(rows: list[Row], out: Path) -> None:
    from dome_lab.paper.device import device_name
    from dome_lab.paper.lock import PATIENCE, locked
    from dome_lab.paper.rows import append_run, record_session

    with locked(out.parent, patience=PATIENCE):
        record_session(out, {"what": "runs of dome train"}, device_name())
        append_run(out, rows)


def _rows(run: Run, state: StateFile | None) -> list[Row]:
    from dome_lab.cli.progress import simple_bar
    from dome_lab.paper.cost import guessed_seconds
    from dome_lab.paper.train import compute_run

    rows = [] if state is None else list(state.rows)
    if rows:
        kept = kept_states([state.path]) if state else ""
        console.print(f"Going on after epoch {len(rows)} of {run.epochs}{kept}.")
    left = guessed_seconds(run) * (1 - len(rows) / run.epochs)
    with simple_bar(left, transient=True) as bar:
        task = bar.add_task(f"reading {run.task}", total=None)

        def told(epoch: int, step: int, num_steps: int) -> None:
            interrupts.check()
            bar.update(
                task,
                total=run.epochs * num_steps,
                completed=(epoch - 1) * num_steps + step,
                description=f"epoch {epoch}/{run.epochs}, step {step}/{num_steps}",
            )

        computed = compute_run(run, told, state)
        with users_values():  # the samples, the model and the filter are made here
            first = next(computed, None)
        console.print(str(run), soft_wrap=True)
        _show(rows)
        for row in computed if first is None else chain([first], computed):
            rows.append(row)
            console.print(_line(row))
    return rows


def _show(rows: list[Row]) -> None:
    console.print(
        "\n".join(["  ".join(title for title, _, _ in _COLUMNS), *map(_line, rows)])
    )


def _check_file(out: Path | None) -> None:
    """Find out now, not after an hour, whether rows can be added to the file."""
    if out is None:
        return
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: give a file")
    check_folder(out.absolute().parent)
    from dome_lab.paper.rows import check_own, is_noted, meta_path

    with users_values():
        check_own(meta_path(out), is_noted)
    if out.exists():
        try:
            out.open("a").close()
        except OSError as error:
            why = error.strerror
            raise UserError(f"--out {out} cannot be written to: {why}") from error
