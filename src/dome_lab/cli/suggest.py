"""``dome suggest``: is the filter worth it on a model and its data; with which rank?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dome_lab.cli.plan import load_object
from dome_lab.cli.screen import UserError, console, one_line_errors, users_values
from dome_lab.interrupts import working

PARTS = 3  # of what a factory gives


def command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="package.module:factory; called without arguments, it gives "
            "(model, loss_fn, loader). loss_fn is None for a model that returns its "
            "loss."
        ),
    ],
    batches: Annotated[
        int, typer.Option(help="Batches to look at: half to learn, half to judge.")
    ] = 50,
    memory: Annotated[
        float | None,
        typer.Option(help="GB for the filter: half of what is free by default."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw it to this file, such as suggest.png.")
    ] = None,
) -> None:
    """Watch some batches: which rank to filter with, and what that saves.

    Nothing is trained, and the model is not changed.
    """
    with one_line_errors(context, "nothing was changed"):
        if picture is not None and not picture.absolute().parent.is_dir():
            raise UserError(f"there is no folder {picture.parent}: make it first")
        if memory is not None and not memory > 0:
            raise UserError(f"--memory must be a positive number of GB, got {memory}")
        made = load_object(model)
        if not isinstance(made, tuple | list) or len(made) != PARTS:
            raise UserError(
                f"{model} gave a {type(made).__name__}: return a tuple "
                "(model, loss_fn, loader)"
            )
        import dome
        from dome.planning.units import GIGA

        num_bytes = None if memory is None else max(1, int(memory * GIGA))
        status = console.status(f"Looking at {batches} batches ...")
        with working(), users_values(), status:
            network, loss_fn, loader = made
            found = dome.suggest(network, loss_fn, loader, batches, memory=num_bytes)
        console.print(str(found), soft_wrap=True, highlight=False, markup=False)
        if picture is not None:
            with users_values():
                found.draw().savefig(picture)
            console.print(f"Drawn to {picture}.")
