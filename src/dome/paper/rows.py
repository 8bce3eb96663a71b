"""Results on disk: flat rows in JSON lines, what made them in a ``.meta.json`` beside.

A run's rows are appended in one write when the run is over, so a stopped job loses the
runs under way and nothing else. Half a run, or half a line, is dropped on the way in.
"""

import json
import os
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

Value = str | int | float | bool | None
Row = dict[str, Value]


def read_rows(path: Path) -> list[Row]:
    """The whole rows of a file, in order; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [row for line in lines if (row := _parse(line)) is not None]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows in one write and wait until the disk has them."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def resume_rows(
    path: Path, settings: Row, key: Sequence[str], rows_per_run: int
) -> list[Row] | None:
    """Make a file ready to append to, and return the rows that are already good.

    Args:
        path: The JSONL file; its folder exists.
        settings: What the rows depend on. Rows made with other settings are removed.
        key: The columns that name a run.
        rows_per_run: How many rows a finished run has.

    Returns:
        The rows of finished runs, or None if there were rows of other settings.
    """
    meta = meta_path(path)
    # Through JSON, because that is what the stored settings went through.
    same = _stored_settings(meta) == json.loads(json.dumps(settings))
    old = read_rows(path)
    kept = _finished(old, key, rows_per_run) if same else []
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
    if not same:
        facts = {"settings": settings, "made_with": provenance()}
        write_text(meta, json.dumps(facts, indent=2) + "\n")
    return None if old and not same else kept


def meta_path(path: Path) -> Path:
    """Where the settings and the provenance of a row file are."""
    return path.with_suffix(".meta.json")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: into a neighbour, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def provenance() -> Row:
    """Versions, commit and machine, as flat values."""
    return {
        "dome": dome_version(),
        "commit": _commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": "cpu",
        "cores": os.cpu_count(),
    }


def dome_version() -> str:
    """The version of this package."""
    return version("dome-torch")


def _finished(rows: list[Row], key: Sequence[str], rows_per_run: int) -> list[Row]:
    runs: dict[tuple[Value, ...], list[Row]] = defaultdict(list)
    for row in rows:
        runs[tuple(row[column] for column in key)].append(row)
    return [row for run in runs.values() if len(run) == rows_per_run for row in run]


def _stored_settings(meta: Path) -> object:
    try:
        facts = json.loads(meta.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return facts.get("settings") if isinstance(facts, dict) else None


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:  # the line that was being written when it stopped
        return None
    return row if isinstance(row, dict) else None


def _commit() -> str | None:
    """The commit of the source tree, None for an installed package."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
