"""The Python of a page runs, in order and in one namespace that begins with PRELUDE."""

import pytest
from docs.pages import DOCS, PAGES, blocks, name

PRELUDE = """
from collections import OrderedDict
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import dome

torch.manual_seed(0)
loader = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)]
x, y = loader[0]
model = nn.Sequential(OrderedDict(
    body=nn.Sequential(nn.Linear(64, 32), nn.ReLU()), head=nn.Linear(32, 10)
))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
grad_filter = dome.attach(model, optimizer, rank=20)
gradient = torch.randn(500)
"""
# Blocks that say how a filter is made begin without one.
MAKES_ITS_OWN = {"README.md", "docs/how-to/compress.md"}
# By how a block begins: they need a trainer, which takes seconds to import, and each
# runs in full as a recipe of examples/, which the tests run.
ELSEWHERE = {
    "from dome.integrations.lightning import": "examples/lightning_digits.py",
    "from dome.integrations.transformers import": "examples/transformers_sentences.py",
    "from dome.integrations import accelerate": "tests/integrations/test_accelerate.py",
}
# Tutorials are programs: test_tutorials.py runs them.
LESSONS = DOCS / "tutorials"
WITH_CODE = [
    page for page in PAGES if blocks(page.read_text()) and page.parent != LESSONS
]


def begins(block):
    return next((start for start in ELSEWHERE if block.startswith(start)), None)


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    exec(PRELUDE, names)
    if name(page) in MAKES_ITS_OWN:
        names.pop("grad_filter").detach()
    for block in blocks(page.read_text()):
        code = compile(block, name(page), "exec")
        if begins(block) is None:
            exec(code, names)


def test_code_is_found_and_little_of_it_is_left_out():
    found = [block for page in WITH_CODE for block in blocks(page.read_text())]
    left_out = [begins(block) for block in found if begins(block)]
    assert sorted(left_out) == sorted(ELSEWHERE)
    assert len(found) - len(left_out) >= 9
