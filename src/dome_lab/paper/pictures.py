"""Pictures on disk, whole or not at all."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from dome.files import write_bytes


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with; the same bytes every time."""
    kind = path.suffix.removeprefix(".")
    # A date would make every drawing of the same rows a different file.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    drawn = io.BytesIO()  # in memory: what draws does not notice a disk that is full
    figure.savefig(drawn, format=kind, metadata=metadata)
    write_bytes(path, drawn.getvalue())
