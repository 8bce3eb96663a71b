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
FEDERATED = "federated.py"  # makes an environment where Flower is missing
ELSEWHERE = (*WITH_WORKERS, FEDERATED)
ALONE = [path for path in EXAMPLES if path.name not in ELSEWHERE]


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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_federated_example_runs_where_flower_is(monkeypatch, capfd):
    pytest.importorskip("flwr")
    (path,) = (path for path in EXAMPLES if path.name == FEDERATED)
    few = ["--rounds", "2", "--images", "200", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", [str(path), *few])
    runpy.run_path(str(path), run_name="__main__")
    lines = capfd.readouterr().out.splitlines()
    up = [float(line.split()[-3]) for line in lines if "MB down" in line]
    plain, top_k, filtered = up
    assert top_k < filtered < plain
