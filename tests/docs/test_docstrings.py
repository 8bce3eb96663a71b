"""The examples of docstrings give what they show."""

import doctest
import importlib

import pytest
from docs.pages import ROOT

SOURCES = ROOT / "src"
WITH_EXAMPLES = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCES.rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(module):
    done = doctest.testmod(importlib.import_module(module))
    assert done.attempted
    assert not done.failed


def test_examples_are_found():
    assert "dome.diagnostics.angles" in WITH_EXAMPLES
