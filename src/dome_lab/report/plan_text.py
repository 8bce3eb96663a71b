"""What a filter would cost, as a table."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from dome.planning.training import Plan
from dome.planning.units import size


def plan_heading(plans: Sequence[Plan], model: str, where: str) -> str:
    """What is planned for, in a line."""
    plan, ranks = plans[0], ", ".join(str(plan.rank) for plan in plans)
    return (
        f"{model}: {plan.dim:,} parameters, rank {ranks}, batches of "
        f"{plan.batch_size}; {size(plan.available)} of memory {where}."
    )


def plan_table(plans: Sequence[Plan], update_every: Sequence[int]) -> Table:
    """One row for each rank, layout and storage; a column of times for each n.

    The time is that of a step on average.

    Args:
        plans: One a rank.
        update_every: Numbers of steps from one update to the next.
    """
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
