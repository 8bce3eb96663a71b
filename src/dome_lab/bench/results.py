"""Results on disk: for each question a JSON file, with what made it, and a table."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dome_lab.bench.tables import TextTable
from dome_lab.paper.rows import provenance, write_text

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
