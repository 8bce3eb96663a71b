"""Try a filter on models of other libraries; makes docs/reference/models.md.

    cd benchmarks && python -m model_zoo

runs all of them, each library in a process of its own, and writes the rows and the
tables; ten minutes on two cores. A library that is not installed keeps the rows it has.
Diffusers and PyTorch Geometric are no part of the development environment:

    python -m venv zoo
    zoo/bin/pip install -e . transformers peft diffusers torch_geometric

With the name of a table, and of models in it if only some are wanted, rows are printed
and nothing is written:

    python -m model_zoo "PEFT" LoRA DoRA
"""

import argparse
import importlib
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version

import torch

from model_zoo import table
from model_zoo.case import Case
from model_zoo.judge import Verdict, judge

# The module and the dictionary of each table, and the package it needs.
LIBRARIES = {
    "causal language models": ("causal_models", "CAUSAL", "transformers"),
    "vision-language models": ("vision_language_models", "MODELS", "transformers"),
    "other Transformers": ("transformers_models", "TRANSFORMERS", "transformers"),
    "PEFT": ("peft_models", "PEFT", "peft"),
    "Diffusers": ("diffusers_models", "DIFFUSERS", "diffusers"),
    "PyTorch Geometric": ("graph_models", "GRAPHS", "torch_geometric"),
}
TIMEOUT = 1800  # seconds for one library


def cases(library: str) -> dict[str, Callable[[], Case]]:
    """The models of one library; raises ``ImportError`` if it is not installed."""
    module, name, _ = LIBRARIES[library]
    found: dict[str, Callable[[], Case]] = getattr(
        importlib.import_module(f"model_zoo.{module}"), name
    )
    return found


def rows(library: str, only: Sequence[str] = ()) -> Iterator[table.Row]:
    """One for each model of a library."""
    package = LIBRARIES[library][2]
    made_with = f"{package} {version(package)}, torch {version('torch')}"
    found = cases(library)
    for name in only or found:
        try:
            verdict = judge(library, name, found[name])
        except Exception as error:  # noqa: BLE001 (of another library: told in its row)
            reason = f"{type(error).__name__}: {error}"
            verdict = Verdict(library, name, "", "failed", reason=reason)
        yield asdict(verdict) | {"made_with": made_with}
    if library == "causal language models" and not only:
        from model_zoo.causal_models import NOT_BUILT

        for name, reason in NOT_BUILT.items():
            verdict = Verdict(library, name, "", "not tried", reason=reason)
            yield asdict(verdict) | {"made_with": made_with}


def in_another_process(library: str) -> list[table.Row]:
    """The rows of a library, none if it cannot be imported or does not end."""
    command = [sys.executable, "-m", "model_zoo", library]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=TIMEOUT, check=True, text=True
        )
    except subprocess.SubprocessError as error:
        print(f"{library}: {error}; its rows stay as they are", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Judge every model that can be imported here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", choices=LIBRARIES)
    parser.add_argument("models", nargs="*", help="only these")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    if arguments.library:
        for row in rows(arguments.library, arguments.models):
            print(json.dumps(row), flush=True)
        return
    old = table.read()
    found = []
    for library in LIBRARIES:
        own = in_another_process(library)
        found += own or [row for row in old if row["library"] == library]
    table.write(found)


if __name__ == "__main__":
    main()
