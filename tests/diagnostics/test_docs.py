import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "logging.md"


def test_the_program_in_the_docs_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (source,) = (block for block in blocks if "Drift(" in block)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(source, {})
    shown = capsys.readouterr().out
    assert shown.count("turned by up to") == 4
    assert "dome.attach(model, optimizer, rank=" in shown
    assert "GaussNewton" in shown
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 101
