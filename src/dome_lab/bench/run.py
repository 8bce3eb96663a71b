"""Asks questions one after the other and writes each answer when it is there."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dome_lab.bench.questions import load
from dome_lab.paper.rows import provenance, write_text

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class TextTable:
    """Headings and rows of text.

    Attributes:
        title: What the numbers are.
        headings: One a column; the first column is words, the others are numbers.
        rows: As many texts as there are headings, each.
        notes: Sentences below it.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table as Markdown, title above and notes below."""
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [_line(cells) for cells in (self.headings, rule, *self.rows)]
        below = "".join(f"\n{note}\n" for note in self.notes)
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n" + below

    def rich(self) -> Table:
        """The table for a terminal."""
        from rich import box
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def milliseconds(seconds: float) -> str:
    """A duration with three digits; in seconds from one upwards."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """A share, in whole per cent; tenths below ten."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


Row = dict[str, Any]


def machine(device: str = "cpu") -> Row:
    """Versions, commit, processor, cores and threads; the GPU if it did the work."""
    threads = torch.get_num_threads()
    facts = provenance() | {"processor": _processor(), "threads": threads}
    if torch.device(device).type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def save(
    folder: Path, question: str, config: object, seconds: float, rows: list[Row]
) -> Path:
    """Write the rows and what made them; whole or not at all."""
    facts: Mapping[str, Any] = {
        "question": question,
        "config": asdict(config),  # type: ignore[call-overload] # Config of a question
        "machine": machine(getattr(config, "device", "cpu")),
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    path = folder / f"{question}.json"
    write_text(path, json.dumps(facts, indent=1) + "\n")
    return path


def save_table(folder: Path, question: str, table: TextTable) -> Path:
    """Write the table as Markdown, to be pasted."""
    path = folder / f"{question}.md"
    write_text(path, table.markdown())
    return path


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out of a question, and the files it was written to."""

    question: str
    table: TextTable
    paths: tuple[Path, ...]


def expected_seconds(names: Sequence[str], scale: str) -> float:
    """About how long the questions take together."""
    return sum(_seconds(name, scale) for name in names)


def ask(
    names: Sequence[str], scale: str, folder: Path, tell: Tell, device: str = "cpu"
) -> Iterator[Answer]:
    """Yield each answer after writing its JSON and its table.

    Args:
        names: Questions, in order.
        scale: Key of their ``SCALES``.
        folder: An existing folder.
        tell: Is given what is being done, and the expected seconds of the whole that
            are behind.
        device: Where the work is done that is measured.
    """
    behind = 0.0
    for name in names:
        weight = _seconds(name, scale)

        def told(
            what: str, share: float, behind: float = behind, weight: float = weight
        ) -> None:
            tell(what, behind + share * weight)

        answer = _answer(name, scale, folder, told, device)
        behind += weight
        tell(name, behind)
        yield answer


def _answer(name: str, scale: str, folder: Path, tell: Tell, device: str) -> Answer:
    question = load(name)
    config = question.SCALES[scale]
    if hasattr(config, "device"):
        config = replace(config, device=device)
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Steps on made samples are measured, not what they learn.
        warnings.filterwarnings("ignore", ".*samples have determined", RuntimeWarning)
        rows = question.compute(config, tell)
    table = question.table(rows)
    paths = (
        save(folder, name, config, time.perf_counter() - start, rows),
        save_table(folder, name, table),
    )
    return Answer(name, table, paths)


def _seconds(name: str, scale: str) -> float:
    question = load(name)
    return question.expected_seconds(question.SCALES[scale])
