"""What a filter did, as a row of a trainer's log."""

from dataclasses import fields

from dome.diagnostics import FilterStats


def log_row(stats: FilterStats, prefix: str) -> dict[str, float]:
    """The numbers of a record by name; the trainer counts steps itself."""
    named = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return {
        f"{prefix}{name}": float(value)
        for name, value in named.items()
        if name != "step" and isinstance(value, int | float)
    }
