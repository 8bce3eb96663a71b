"""``dome plan``: what the filter will cost, in one process or across workers.

Models are given by name: those of the experiments, or anybody's by import path.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated

import typer

from dome_lab.cli.screen import UserError, console, one_line_errors, users_values
from dome_lab.interrupts import working

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from rich.table import Table
    from torch import nn

    from dome.planning.training import Plan

BUILT_IN = ("resnet8", "resnet18", "transformer")
CHANNELS, CLASSES = 3, 10  # of the images that the networks are made for
TEXT_CLASSES = 70  # of DBPedia-Classes


def load_model(name: str) -> nn.Module:
    """A model, built in or ``package.module:factory``; mistakes are the user's."""
    if ":" in name:
        return _made(name)
    if name not in BUILT_IN:
        hint = _nearest(name, BUILT_IN) or "."
        raise UserError(
            f"no model {name!r}{hint} There are {', '.join(BUILT_IN)}; a model of your "
            "own is package.module:factory"
        )
    return _built_in(name)


def _built_in(name: str) -> nn.Module:
    from dome_lab.paper.models import Transformer, resnet8, resnet18
    from dome_lab.paper.tasks import DBPEDIA_VOCABULARY

    makers: dict[str, Callable[[], nn.Module]] = {
        "resnet8": lambda: resnet8(CHANNELS, CLASSES),
        "resnet18": lambda: resnet18(CHANNELS, CLASSES),
        "transformer": lambda: Transformer(DBPEDIA_VOCABULARY, TEXT_CLASSES),
    }
    return makers[name]()


def _made(path: str) -> nn.Module:
    from torch import nn

    made = load_object(path)
    if not isinstance(made, nn.Module):
        raise UserError(f"{path} gave a {type(made).__name__}, not a torch.nn.Module")
    return made


def load_object(path: str) -> object:
    """A model, or what a function makes, by ``package.module:name``."""
    from torch import nn

    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise UserError(f"{path!r} is no import path: write package.module:factory")
    with _here():
        module = _imported(module_name)
        if not hasattr(module, attribute):
            names = [name for name in vars(module) if not name.startswith("_")]
            hint = _nearest(attribute, names)
            raise UserError(f"{module_name} has no {attribute!r}{hint}")
        found = getattr(module, attribute)
        return found if isinstance(found, nn.Module) else _called(path, found)


def _imported(name: str) -> ModuleType:
    """Import package after package, so that the first one missing can be named."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        try:
            module = import_module(part)
        except ModuleNotFoundError as error:
            if error.name != part:  # something that it needs itself
                raise UserError(
                    f"importing {part} failed: {error.name} is missing"
                ) from error
            siblings = iter_modules(module.__path__) if end > 1 else iter_modules()
            hint = _nearest(parts[end - 1], [sibling.name for sibling in siblings])
            raise UserError(f"no module {part!r}{hint}") from error
        except Exception as error:
            raise UserError(f"importing {part} failed: {_words(error)}") from error
        if end < len(parts) and not hasattr(module, "__path__"):
            raise UserError(f"{part} is a module, not a package: no {name!r} in it")
    return module


def _called(path: str, factory: object) -> object:
    if not callable(factory):
        kind = type(factory).__name__
        raise UserError(f"{path} is a {kind}: give a function that makes a model")
    try:
        return factory()
    except Exception as error:
        raise UserError(
            f"{path}() failed: {_words(error)}; it is called without arguments"
        ) from error


@contextmanager
def _here() -> Iterator[None]:
    """Modules of the current folder are found too, as by ``python -m``."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else "."


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _table(plans: Sequence[Plan], update_every: Sequence[int]) -> Table:
    """One row for each rank, layout and storage; a column of times for each n.

    The time is that of a step on average.

    Args:
        plans: One a rank.
        update_every: Numbers of steps from one update to the next.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from dome.planning.units import size

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right")
    for heading in ("layout", "basis"):
        table.add_column(heading, no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("up to\nrank", justify="right", no_wrap=True)
    for number in update_every:
        table.add_column(f"time,\nevery {number}", justify="right", no_wrap=True)
    for plan in plans:
        for place, choice in enumerate(plan.choices, start=1):
            table.add_row(
                f"{plan.rank:,}" if place == 1 else "",
                choice.layout,
                choice.storage.replace(", ", ",\n"),  # for a screen of 80 columns
                size(choice.memory),
                Text("yes", style="green") if choice.fits else Text("no", style="red"),
                f"{choice.largest_rank:,}",
                *(_short(choice.seconds_with(n)) for n in update_every),
                end_section=place == len(plan.choices),
            )
    return table


def _short(seconds: float) -> str:
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= one:
            return f"{seconds / one:,.{0 if seconds >= 100 * one else 1}f} {unit}"
    return f"{1e6 * seconds:.0f} µs"


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

        dim = (
            _number(parameters)
            if parameters
            else sum(p.numel() for p in load_model(str(model)).parameters())
        )
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
    from dome.planning.units import GIGA, size

    network = load_model(model)
    num_bytes = None if memory is None else max(1, int(memory * GIGA))
    with working(), users_values(), console.status("Timing an update ..."):
        plans = [
            plan(network, one, batch_size, positions=positions, memory=num_bytes)
            for one in ranks
        ]
    where = "that this machine has left" if memory is None else "given by --memory"
    console.print(
        f"{model}: {plans[0].dim:,} parameters, rank {', '.join(map(str, ranks))}, "
        f"batches of {batch_size}; {size(plans[0].available)} of memory {where}.",
        soft_wrap=True,
    )
    console.print(_table(plans, sorted(set(update_every))))
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
