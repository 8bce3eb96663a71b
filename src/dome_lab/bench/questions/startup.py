"""How long does it take to import dome, and to be answered by ``dome --help``?

Each in a new process; the least of several is what the machine needs when nothing
else holds it up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dome_lab.bench.tables import TextTable, milliseconds
from dome_lab.bench.timing import Pace, Variant, measure, seconds_of, spread

if TYPE_CHECKING:
    from dome_lab.bench.questions import Tell
    from dome_lab.bench.results import Row

COMMANDS = {
    "python, doing nothing": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import dome": ["-c", "import dome"],
    "import dome; dome.attach": ["-c", "import dome; dome.attach"],
    "dome --help": ["-m", "dome_lab.cli", "--help"],
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the question."""

    num_rounds: int = 7


SCALES = {
    "smoke": Config(num_rounds=1),
    "quick": Config(num_rounds=3),
    "usual": Config(),
    "full": Config(num_rounds=15),
}


def expected_seconds(config: Config) -> float:
    """About how long it takes."""
    return 4.0 * config.num_rounds


def compute(config: Config, tell: Tell) -> list[Row]:
    """One row per command."""
    variants = [
        Variant(name, _process(arguments), num_settle=0, num_warmup=0)
        for name, arguments in COMMANDS.items()
    ]
    pace = Pace(seconds=0, least=config.num_rounds, most=config.num_rounds)
    rounds = measure(variants, pace, lambda share: tell("start-up", share))
    return [
        {
            "command": name,
            "num_rounds": len(rounds),
            "least": min(seconds_of(rounds, name)),
            "median": spread(seconds_of(rounds, name)).median,
            "seconds": seconds_of(rounds, name),
        }
        for name in COMMANDS
    ]


def _process(arguments: list[str]) -> Callable[[], object]:
    command = [sys.executable, *arguments]
    return lambda: subprocess.run(command, capture_output=True, check=True)


def table(rows: list[Row]) -> TextTable:
    """Commands: the least time and the median."""
    lines = [
        [row["command"], milliseconds(row["least"]), milliseconds(row["median"])]
        for row in rows
    ]
    headings = ("", "least", "median")
    return TextTable("Start-up time, each in a new process", headings, lines)
