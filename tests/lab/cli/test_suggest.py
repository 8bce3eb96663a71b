import pytest
from typer.testing import CliRunner

from dome_lab.cli import app

FACTORY = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def made():
    torch.manual_seed(0)
    x, y = torch.randn(96, 6), torch.randint(3, (96,))
    return nn.Linear(6, 3), cross_entropy, list(zip(x.split(8), y.split(8)))


def alone():
    return nn.Linear(6, 3)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "handed_to_suggest.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)

    def suggest(name, *more):
        model = f"handed_to_suggest:{name}"
        return CliRunner().invoke(app, ["suggest", "--model", model, *more])

    return suggest


def test_it_prints_the_table_and_draws_the_picture(run, tmp_path):
    result = run("made", "--batches", "8", "--picture", "found.png")
    assert result.exit_code == 0, result.output
    assert "21 parameters; learned on 32 samples, judged on 32 others" in result.output
    assert "direction_rank=4" in result.output
    assert (tmp_path / "found.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("alone", [], "gave a Linear: return a tuple (model, loss_fn, loader)"),
        ("made", ["--batches", "2"], "batches must be at least 4"),
        ("made", ["--memory", "0"], "--memory must be a positive number"),
        ("made", ["--picture", "no/where.png"], "there is no folder no"),
        ("missing", [], "has no"),
    ],
)
def test_mistakes_are_one_line(run, name, more, message):
    result = run(name, *more)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
