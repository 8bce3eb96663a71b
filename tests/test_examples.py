import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WITH_WORKERS = (
    "comm_hook.py",
    "distributed.py",
    "fully_shard.py",
)  # see tests/distributed
# As many steps as the directions need before they filter, and two; forty by default.
OPTIONS = {"language_model.py": ["--steps", "12"]}
WITHOUT = ("without the filter", "filtered=False", "no filter", "plain: ")
WITH = ("with it ", "filtered=True", "rank 4, loss", "filtered: ")
ALONE = [path for path in EXAMPLES if path.name not in WITH_WORKERS]


@pytest.mark.slow
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
@pytest.mark.filterwarnings("default")  # as for those who run it
def test_every_example_runs_and_shows_both_arms(path, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *OPTIONS.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    said = capfd.readouterr().out
    for arm in (WITHOUT, WITH):
        assert any(words in said for words in arm), arm


def test_the_quickstart_fits_a_screen():
    (path,) = (path for path in EXAMPLES if path.name == "quickstart.py")
    assert len(path.read_text().splitlines()) <= 33
