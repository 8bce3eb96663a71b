"""Pictures on disk, whole or not at all."""

from pathlib import Path

from matplotlib.figure import Figure


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with; the same bytes every time."""
    kind = path.suffix.removeprefix(".")
    temporary = path.with_name(path.name + ".tmp")
    # A date would make every drawing of the same rows a different file.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    figure.savefig(temporary, format=kind, metadata=metadata)
    temporary.replace(path)
