"""``dome plan``: what the filter will cost, in one process or across workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dome.cli.screen import UserError, console, one_line_errors, users_values

if TYPE_CHECKING:
    from torch import nn

CHANNELS, CLASSES = 3, 10  # of the images that --model is planned for


def command(
    context: typer.Context,
    parameters: Annotated[
        str | None, typer.Option(help="Number of parameters, like 1e9.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Or a model: resnet8 or resnet18.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Directions to remove.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Samples a step, of a worker.")] = 32,
    workers: Annotated[
        list[int] | None,
        typer.Option(help="Number of workers; may be given more than once."),
    ] = None,
    rate: Annotated[float, typer.Option(help="Of the compressor.")] = 1000,
    memory: Annotated[float, typer.Option(help="GB of a worker.")] = 80,
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
        if workers is None:
            _plan_here(model, rank, batch_size)
            return
        from dome.scaling import Machine, plan_workers

        dim = _number(parameters) if parameters else _count(model)
        machine = Machine(
            memory=memory * 1e9, bandwidth=bandwidth * 1e9, speed=speed * 1e12
        )
        for num in workers:
            with users_values():
                plan = plan_workers(
                    dim, rank, batch_size, num, rate=rate, machine=machine
                )
            console.print(str(plan), soft_wrap=True, markup=False)


def _plan_here(model: str | None, rank: int, batch_size: int) -> None:
    if model is None:
        raise UserError("--parameters needs --workers; without, give --model")
    from dome.planning import plan

    with users_values():
        planned = plan(_network(model), rank, batch_size)
    console.print(str(planned), soft_wrap=True, markup=False)


def _number(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise UserError(f"--parameters must be a number, got {text!r}") from None


def _count(model: str | None) -> int:
    return sum(p.numel() for p in _network(model).parameters())


def _network(model: str | None) -> nn.Module:
    from dome.paper.models.resnet8 import resnet8
    from dome.paper.models.resnet18 import resnet18

    networks = {"resnet8": resnet8, "resnet18": resnet18}
    if model not in networks:
        raise UserError(f"no model {model!r}: choose from {', '.join(networks)}")
    return networks[model](CHANNELS, CLASSES)
