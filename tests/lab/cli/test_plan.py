import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dome
from dome.planning import training as planning
from dome.planning.trial import UpdateTimes
from dome_lab.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_plan_for_several_numbers_of_workers():
    result = run("--parameters", "1e9", "--rank", 50, "--workers", 8, "--workers", 64)
    assert result.exit_code == 0, result.output
    assert "1,000,000,000 parameters, rank 50, 8 workers" in result.output
    assert "64 workers" in result.output
    assert 'attach(model, optimizer, rank=50, samples="worker")' in result.output


def test_a_plan_for_a_model_on_this_machine():
    result = run("--model", "resnet8", "--rank", 4, "--batch-size", 8)
    assert result.exit_code == 0, result.output
    assert "78,042 parameters, rank 4, batches of 8" in result.output


KINDS = [(a, b) for a in ("global", "layerwise") for b in ("float32", "bfloat16")]
STREAMS = [("layerwise", "float32,"), ("layerwise", "bfloat16,")]  # below: stream
THIN = ("global", "of")  # rank 4


def table(output):
    """The rows of the table: words between two spaces or more."""
    rows = [line.split() for line in output.splitlines()]
    return [r for r in rows if "global" in r or "layerwise" in r]


def kind(row):
    """Layout and storage."""
    return tuple(row[1:3] if row[0].isdigit() else row[:2])


def test_the_table_has_every_layout_and_storage_of_every_rank():
    result = run("--model", "resnet8", "--rank", 3, "--rank", 5, "--batch-size", 4)
    assert result.exit_code == 0, result.output
    rows = table(result.output)
    assert [row[0] for row in rows if row[0].isdigit()] == ["3", "5"]
    assert [kind(row) for row in rows] == 2 * [*KINDS, *STREAMS, THIN]
    assert result.output.count("stream") == 4
    assert "…" not in result.output
    assert all(row.count("yes") == 1 for row in rows)
    for number in (1, 4, 16):
        assert f"every {number}" in result.output


def test_what_fits_is_judged_by_the_memory_given():
    arguments = ("--model", "resnet8", "--rank", 100, "--batch-size", 16)
    result = run(*arguments, "--memory", 0.045, "--update-every", 8)
    assert "45 MB of memory given by --memory" in " ".join(result.output.split())
    fits = {kind(row): "yes" in row for row in table(result.output)}
    assert fits == {
        (layout, dtype): dtype.startswith("bfloat16")
        for layout, dtype in (*KINDS, *STREAMS, THIN)
    }
    assert "every 8" in result.output
    assert "every 16" not in result.output
    assert "basis_dtype=torch.bfloat16" in result.output


def test_a_model_of_ones_own_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_plan_nets.py").write_text(
        "from torch import nn\n"
        "def tiny():\n    return nn.Linear(7, 3)\n"
        "ready = nn.Linear(2, 1)\n"
        "def broken():\n    raise KeyError('weights')\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "time_updates", lambda *_: UpdateTimes(0.0, 0.0))
    path = list(sys.path)
    for name, dim in (("tiny", 24), ("ready", 3)):
        result = run("--model", f"my_plan_nets:{name}", "--rank", 2)
        assert f"my_plan_nets:{name}: {dim} parameters" in result.output
    assert sys.path == path
    for name, message in {
        "tinny": "my_plan_nets has no 'tinny': did you mean 'tiny'?",
        "broken": "my_plan_nets:broken() failed: KeyError: 'weights'",
        "number": "my_plan_nets:number gave a int, not a torch.nn.Module",
    }.items():
        result = run("--model", f"my_plan_nets:{name}", "--rank", 2)
        assert result.exit_code == 2
        assert message in result.output
        assert result.output.count("\n") == 1


def test_a_model_that_takes_no_memory_is_planned_for_the_cpu():
    with torch.device("meta"):
        model = nn.Linear(100_000, 10_000)
    plan = dome.plan(model, rank=2, batch_size=2, memory=10**9)
    assert plan.dim == 1_000_010_000
    assert not plan.choices[0].fits
    assert plan.choices[0].seconds > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet9", "no model 'resnet9': did you mean 'resnet8'?"),
        ("my.model", "a model of your own is package.module:factory"),
        ("dme.models:x", "no module 'dme': did you mean 'dome'?"),
        ("dome_lab.paper.model:x", "'dome_lab.paper.model': did you mean 'models'?"),
        ("dome_lab.paper.models:resnet", "did you mean 'resnet8'?"),
        ("json.decoder.x:y", "json.decoder is a module, not a package"),
        ("math:pi", "math:pi is a float: give a function that makes a model"),
        ("torch.nn:Linear", "it is called without arguments"),
        (":factory", "is no import path: write package.module:factory"),
        ("module:", "is no import path"),
        ("torch.nn:ReLU", "no trainable parameter"),
    ],
)
def test_a_wrong_model_is_one_line_with_the_nearest_name(model, message):
    result = run("--model", model, "--rank", 2)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("dome: ")
    assert result.output.count("\n") == 1


def test_what_cannot_be_planned_is_one_line():
    for arguments in (
        (),
        ("--parameters", "1e9"),
        ("--parameters", "many", "--workers", 2),
        ("--model", "resnet8", "--rank", 10**9, "--workers", 2),
        ("--model", "lenet", "--workers", 2),
        ("--model", "resnet8", "--memory", -1),
        ("--model", "resnet8", "--memory", "nan"),
        ("--model", "resnet8", "--rank", 0),
        ("--model", "resnet8", "--batch-size", 0),
        ("--model", "resnet8", "--update-every", 0),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.output.startswith("dome: ")
        assert result.output.count("\n") == 1
