import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["how-to/privacy", "how-to/continual"])
def test_every_example_of_the_page_runs(name, tmp_path, monkeypatch, capsys):
    text = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks:
            exec(block, {})
    if name == "how-to/privacy":
        assert "50 steps cost epsilon 4.9" in capsys.readouterr().out
