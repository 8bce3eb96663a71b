"""Asks questions one after the other and writes each answer when it is there."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dome_lab.bench import results
from dome_lab.bench.questions import load
from dome_lab.bench.tables import TextTable

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
    rows = question.compute(config, tell)
    table = question.table(rows)
    paths = (
        results.save(folder, name, config, time.perf_counter() - start, rows),
        results.save_table(folder, name, table),
    )
    return Answer(name, table, paths)


def _seconds(name: str, scale: str) -> float:
    question = load(name)
    return question.expected_seconds(question.SCALES[scale])
