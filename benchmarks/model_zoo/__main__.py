"""Writes the table of docs/models.md: every model, and how exact its samples are.

Diffusers and PyTorch Geometric are no part of the development environment. In one of
its own, beside the project's folder:

    python -m venv zoo
    zoo/bin/pip install -e . transformers peft diffusers torch_geometric
    cd benchmarks && ../zoo/bin/python -m model_zoo --write ../docs/models.md

A library that is missing keeps the rows it has in the table. Takes two minutes.
"""

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from model_zoo.judge import Case, Verdict, judge

LIBRARIES = {
    "Transformers": ("transformers_models", "TRANSFORMERS"),
    "PEFT": ("peft_models", "PEFT"),
    "Diffusers": ("diffusers_models", "DIFFUSERS"),
    "PyTorch Geometric": ("graph_models", "GRAPHS"),
}
HEAD = "| model | samples | largest relative error | why |\n| --- | --- | --- | --- |\n"


def cases(library: str) -> dict[str, Callable[[], Case]]:
    """The models of one library; raises ``ImportError`` if it is not installed."""
    module, name = LIBRARIES[library]
    found: dict[str, Callable[[], Case]] = getattr(
        importlib.import_module(f"model_zoo.{module}"), name
    )
    return found


def verdicts(library: str) -> Iterator[Verdict]:
    """One for each model of a library."""
    for name, make in cases(library).items():
        verdict = judge(library, name, make)
        print(f"{library}: {name}: {verdict.result} {verdict.error}", file=sys.stderr)
        yield verdict


def table(found: list[Verdict]) -> str:
    """Rows of Markdown."""
    return HEAD + "".join(
        f"| {v.name} | {v.result} | {_number(v.error)} | {_short(v.reason)} |\n"
        for v in found
    )


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.0e}"


def _short(reason: str) -> str:
    """The first sentence of a refusal: what happened, not what to do."""
    return reason.split(". ")[0].split(": it")[0].replace("|", "/")


def replaced(page: str, library: str, rows: str) -> str:
    """A page with the table of one library between its marks exchanged."""
    start, end = f"<!-- zoo: {library} -->\n", f"<!-- end: {library} -->"
    before, rest = page.split(start)
    return before + start + rows + end + rest.split(end)[1]


def main() -> None:
    """Judge every model that can be imported here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page whose tables to exchange")
    path = parser.parse_args().write
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    for library in LIBRARIES:
        try:
            cases(library)
        except ImportError as error:
            print(f"{library}: {error}", file=sys.stderr)
            continue
        rows = table(list(verdicts(library)))
        if path is None:
            print(f"{library}\n\n{rows}")
        else:
            path.write_text(replaced(path.read_text(), library, rows))


if __name__ == "__main__":
    main()
