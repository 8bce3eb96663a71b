"""Results on disk: flat rows in JSON lines, what made them in a ``.meta.json`` beside.

Every row carries all that its run depends on, so a file needs no index: a run that is
wanted is either in it or not. A run's rows are appended in one piece when the run is
over, each with their number (``of``), so that a job killed at any moment loses the runs
under way and nothing else (``mending.py`` says what becomes of torn and broken lines).
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path

from dome.files import append_bytes, write_bytes
from dome_lab.paper.outputs import check_own, is_noted
from dome_lab.paper.run import Run, Value

Row = dict[str, Value]
Key = tuple[str, Run]  # what made the rows (a module's name), and of which run

TRAINING = "train"
NUM_ROWS, MADE_BY = "of", "made_by"  # the columns that are added to stored rows

_LARGEST = int(sys.float_info.max)
_DEEPEST = 8  # levels of lists and objects in a row
# Lines that may hold what JSON allows and rows do not: looked at value by value.
_IS_ODD = re.compile(rb"\d{300}|\\u[dD]|\xed|[\[{](?:[^\[{]*[\[{]){8}").search


def read_rows(path: Path) -> list[Row]:
    """The whole rows of a file, in order; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [row for line in lines if (row := parse(line)) is not None]


def append_run(path: Path, rows: Sequence[Row], made_by: str = TRAINING) -> list[Row]:
    """Add all rows of a run or none, and wait until the disk has them.

    Args:
        path: The JSONL file; its folder exists.
        rows: All the rows of one run. NaN and infinity become null, and so does a
            spectrum that has them.
        made_by: Sets apart rows of the same run that are of different kinds.

    Returns:
        The rows as they were stored.
    """
    about: Row = {MADE_BY: made_by, NUM_ROWS: len(rows)}
    stored = [{k: _storable(v) for k, v in (row | about).items()} for row in rows]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in stored)
    append_bytes(path, text.encode())
    return stored


def finished_runs(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """The runs of which every row is there; of a run stored twice, the first.

    Rows from before a setting existed get the value that it had then, its default.
    """
    found: dict[Key, list[Row]] = {}
    start = 0
    while start < len(rows):
        key, number = key_of(rows[start]), num_whole(rows, start)
        if key is not None and number:
            block = rows[start : start + number]
            settings = key[1].columns()
            found.setdefault(key, [settings | row for row in block])
        start += number or 1
    return found


def num_whole(rows: Sequence[Row], start: int) -> int:
    """How many rows the whole run has that begins at ``start``; 0 if none does."""
    number = rows[start].get(NUM_ROWS)
    block = rows[start : start + number] if isinstance(number, int) else []
    return len(block) if len(block) == number and same_run(block) else 0


def same_run(rows: Sequence[Row]) -> bool:
    """Whether rows are of one run, and one kind."""
    return all(
        key_of(row) == key_of(rows[0]) and row.get(NUM_ROWS) == rows[0].get(NUM_ROWS)
        for row in rows
    )


def find_run(paths: Iterable[Path], key: Key) -> list[Row] | None:
    """The rows of one run, if this version of the code stored them.

    Only its own lines are parsed: quick enough to ask before every run.
    """
    beginning = json.dumps(key[1].columns())[:-1].encode()
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        mine = [parse(line) for line in lines if line.startswith(beginning)]
        rows = finished_runs([row for row in mine if row is not None])
        if key in rows:
            return rows[key]
    return None


def read_runs(paths: Iterable[Path]) -> dict[Key, list[Row]]:
    """The finished runs of several files."""
    found: dict[Key, list[Row]] = {}
    for path in paths:
        found = finished_runs(read_rows(path)) | found
    return found


def key_of(row: Row) -> Key | None:
    """Which run a row is of; None if that cannot be told."""
    given = {f.name: row[f.name] for f in fields(Run) if f.name in row}
    needed = {f.name for f in fields(Run) if f.default is MISSING}
    if not needed <= given.keys():
        return None
    try:
        run = Run(**given)  # type: ignore[arg-type]
        hash(run)
    except (TypeError, ValueError):  # a value that no run can have
        return None
    return str(row.get(MADE_BY, TRAINING)), run


def seconds_of(rows: Iterable[Row]) -> float:
    """How long rows took to compute, together."""
    taken = (row.get("seconds") for row in rows)
    return math.fsum(s for s in taken if isinstance(s, int | float))


def meta_path(path: Path) -> Path:
    """Where the settings and the provenance of a row file are."""
    return path.with_suffix(".meta.json")


def record_session(
    path: Path, facts: Mapping[str, object], device: str | None = None
) -> None:
    """Note beside the rows what they are, and what is about to add to them.

    Args:
        path: The JSONL file.
        facts: Settings, replacing those that are noted.
        device: What computes the rows; None if none will be added.
    """
    meta = meta_path(path)
    check_own(meta, is_noted)
    sessions = _sessions(meta)
    newest = None if device is None else provenance(device)
    if newest is not None and newest not in sessions:
        sessions.append(newest)
    noted = dict(facts) | {"made_with": sessions}
    write_text(meta, json.dumps(noted, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def provenance(device: str = "cpu") -> Row:
    """Versions, commit and machine, as flat values."""
    return {
        "dome": version("dome-torch"),
        "commit": commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "cores": os.cpu_count(),
    }


def commit() -> str | None:
    """The commit of the source tree, and if it was changed; None if installed."""
    here = str(Path(__file__).parent)
    describe = [
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+changes",
    ]
    command = ["git", "-C", here, *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def parse(line: bytes) -> Row | None:
    """A row, or None for a line that is not one, or is not all there."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict)
    return row if whole and (not _IS_ODD(line) or _is_usable(row)) else None


def _is_usable(value: object, depth: int = 0) -> bool:
    """Whether a value fits a float, a page in UTF-8 and a few levels of nesting."""
    if isinstance(value, str):
        return not any(map(_is_surrogate, value))
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return depth < _DEEPEST and all(_is_usable(one, depth + 1) for one in value)
    return True


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _storable(value: Value) -> Value:
    numbers = value if isinstance(value, list) else [value]
    lost = any(isinstance(v, float) and not math.isfinite(v) for v in numbers)
    return None if lost else value


def _sessions(meta: Path) -> list[object]:
    try:
        facts = json.loads(meta.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    sessions = facts.get("made_with") if isinstance(facts, dict) else None
    return sessions if isinstance(sessions, list) else []
