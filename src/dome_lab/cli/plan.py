"""``dome plan``: what the filter will cost, in one process or across workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from dome_lab.cli.screen import UserError, console, one_line_errors, users_values
from dome_lab.interrupts import working

if TYPE_CHECKING:
    from torch import nn

RANK, UPDATE_EVERY, WORKER_MEMORY = 100, (1, 4, 16), 80.0


def command(
    context: typer.Context,
    parameters: Annotated[
        str | None, typer.Option(help="Number of parameters, like 1e9.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Or a model: resnet8, resnet18, transformer, or one of your own as "
            "package.module:factory."
        ),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            help=f"Directions to remove, {RANK} by default; may be given more than "
            "once."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples a step, of a worker.")] = 32,
    positions: Annotated[
        int,
        typer.Option(
            min=1,
            help="Positions of a sample that weights meet, such as words of a text: "
            "directions of low rank keep output gradients at each.",
        ),
    ] = 1,
    update_every: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Steps between updates; may be given more than once. 1, 4 and 16 by "
            "default.",
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(help="Number of workers; may be given more than once."),
    ] = None,
    rate: Annotated[float, typer.Option(help="Of the compressor.")] = 1000,
    memory: Annotated[
        float | None,
        typer.Option(
            help="GB to plan for: what this machine has left by default; with "
            f"--workers those of a worker, {WORKER_MEMORY:.0f} by default."
        ),
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(help="GB a second that a worker sends.")
    ] = 25,
    speed: Annotated[float, typer.Option(help="Teraflops of a worker.")] = 50,
) -> None:
    """Predict memory, traffic and time of the filter.

    Without --workers the model is timed on this machine; with it, costs are computed
    from the speeds given, and nothing is measured.
    """
    with one_line_errors(context, "nothing was changed"):
        if (parameters is None) == (model is None):
            raise UserError("give either --parameters or --model")
        if memory is not None and not 0 < memory < math.inf:
            raise UserError(f"--memory must be a positive number of GB, got {memory}")
        ranks = rank or [RANK]
        if workers is None:
            often = update_every or UPDATE_EVERY
            _plan_here(model, ranks, batch_size, positions, often, memory)
            return
        from dome.planning.units import GIGA
        from dome.planning.workers import Machine, plan_workers

        dim = _number(parameters) if parameters else _count(model)
        machine = Machine(
            memory=(memory or WORKER_MEMORY) * GIGA,
            bandwidth=bandwidth * GIGA,
            speed=speed * 1e12,
        )
        for num in workers:
            for one in ranks:
                with users_values():
                    plan = plan_workers(
                        dim, one, batch_size, num, rate=rate, machine=machine
                    )
                console.print(str(plan), soft_wrap=True)


def _plan_here(
    model: str | None,
    ranks: list[int],
    batch_size: int,
    positions: int,
    update_every: list[int] | tuple[int, ...],
    memory: float | None,
) -> None:
    if model is None:
        raise UserError("--parameters needs --workers; without, give --model")
    import torch

    from dome.planning.training import plan
    from dome.planning.units import GIGA
    from dome_lab.report.plan_text import plan_heading, plan_table

    network = _network(model)
    num_bytes = None if memory is None else max(1, int(memory * GIGA))
    with working(), users_values(), console.status("Timing an update ..."):
        plans = [
            plan(network, one, batch_size, positions=positions, memory=num_bytes)
            for one in ranks
        ]
    where = "that this machine has left" if memory is None else "given by --memory"
    console.print(plan_heading(plans, model, where), soft_wrap=True)
    console.print(plan_table(plans, sorted(set(update_every))))
    console.print(
        "Time is what the filter adds to a step, on average at update_every=n, beside "
        "taking the samples' gradients in the backward pass. It was measured with "
        f"{torch.get_num_threads()} threads just now.\nTo choose: "
        f"{plans[0].suggestion}",
        soft_wrap=True,
    )


def _number(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise UserError(f"--parameters must be a number, got {text!r}") from None


def _count(model: str | None) -> int:
    return sum(p.numel() for p in _network(model).parameters())


def _network(model: str | None) -> nn.Module:
    from dome_lab.cli.models import load_model

    return load_model(str(model))
