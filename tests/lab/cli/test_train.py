import json
import os

import pytest
import torch
from typer.testing import CliRunner

from dome.files import DiskFullError
from dome_lab.cli import app
from dome_lab.paper.arms import Arm

SMALL = {
    "--num-train": 64,
    "--num-test": 20,
    "--batch-size": 16,
    "--epochs": 2,
    "--rank": 3,
    "--rate": 10,
}


SMALLER = {"model": "relu_mlp"}  # than resnet8, the default: for runs of many kinds


def train(*more, **options):
    named = SMALL | {"--" + k.replace("_", "-"): v for k, v in options.items()}
    words = [str(w) for pair in named.items() if pair[1] is not None for w in pair]
    return CliRunner().invoke(app, ["train", *words, *map(str, more)])


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shows_a_line_an_epoch_under_a_heading():
    result = train()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    start = next(i for i, line in enumerate(lines) if "train loss" in line)
    assert (
        "resnet8 on digits, rank 3 removes span, gaussian at rate 10"
        in lines[start - 1]
    )
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["1", "2"]
    assert max(map(len, lines[start : start + 3])) <= 80


def test_rows_are_added_to_the_file_with_their_provenance(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    assert train(out=path).exit_code == 0
    assert train(out=path, seed=1).exit_code == 0
    stored = rows(path)
    assert [(row["seed"], row["epoch"]) for row in stored] == [
        *((0, 1), (0, 2)),
        *((1, 1), (1, 2)),
    ]
    noted = json.loads((tmp_path / "new" / "rows.meta.json").read_text())
    assert noted["made_with"][0]["torch"]


def test_a_run_that_is_in_the_file_is_shown_and_not_computed_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = train(out=path)
    before = path.read_bytes()
    again = train(out=path)
    assert "already" in again.output
    assert first.output.splitlines()[-2] in again.output.splitlines()
    assert path.read_bytes() == before


def test_every_option_reaches_the_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    options = {
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.5,
        "num_classes": 4,
        "tracker": "svd",
        "forget": 0.2,
        "update_every": 2,
        "layout": "layerwise",
        "oversample": 1,
        "removes": "uncoded",
        "seed": 5,
        "batch_size": 8,
    }
    result = train(out=path, **options)
    assert result.exit_code == 0, result.output
    assert rows(path)[0].items() >= (options | {"rank": 3, "rate": 10}).items()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "mnits"}, "did you mean 'mnist'"),
        ({"model": "resnet9"}, "did you mean 'resnet8'"),
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 10**6}, "rank must be between 1 and"),
        ({"rate": 10**9}, "rate must be at most"),
        ({"lr": "fast"}, "--lr"),
        ({"batch_size": 65}, "batch_size 65 is more than the 64 training samples"),
        ({"num_train": 10**5}, "num_train 100000 is more than"),
        ({"rank": None, "removes": "rest"}, "needs a rank"),
        ({"model": "transformer"}, "takes texts"),
        ({"task": "mnist", "data_dir": "/nowhere"}, "no folder /nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch, options, words):
    monkeypatch.setenv("DOME_DATA", "")  # put back after --data-dir has set it
    result = train(out=tmp_path / "rows.jsonl", **options)
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert result.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_as_file_is_refused(tmp_path):
    result = train(out=tmp_path)
    assert result.exit_code == 2
    assert result.output == f"dome: --out {tmp_path} is a folder: give a file\n"


def without_seconds(path):
    return [{k: v for k, v in r.items() if "seconds" not in k} for r in rows(path)]


class Stop:
    """Ctrl-C in the middle of an epoch: the steps before it were taken."""

    def __init__(self, monkeypatch, num_steps):
        self.left = num_steps
        take = Arm.step

        def step(arm):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return take(arm)

        monkeypatch.setattr(Arm, "step", step)


@pytest.mark.parametrize(
    "options",
    [
        {},
        SMALLER
        | {"rate": None, "rank": None, "optimizer": "sgd", "momentum": 0.9, "lr": 0.01},
        SMALLER | {"tracker": "svd", "update_every": 3, "layout": "layerwise"},
        SMALLER
        | {"removes": "uncoded", "compressor": "topk+feedback", "oversample": 2},
        SMALLER | {"removes": "nothing", "compressor": "qsgd", "rate": 2},
        SMALLER | {"removes": "hessian", "rank": 2, "update_every": 3},
        SMALLER | {"rank": None, "compressor": "powersgd+feedback", "rate": 4},
    ],
)
def test_ctrl_c_keeps_whole_epochs_and_the_rows_are_the_same(
    tmp_path, monkeypatch, options
):
    options = {"epochs": 3, "num_train": 12, "batch_size": 4} | options
    whole, path = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    assert train(out=whole, **options).exit_code == 0
    for num_steps, kept in ((4, 1), (2, 1), (4, 2)):  # three steps make an epoch
        with monkeypatch.context() as patch:
            Stop(patch, num_steps)
            stopped = train(out=path, **options)
        assert stopped.exit_code == 130, stopped.output
        assert f"whole epochs are kept beside {path}" in stopped.output
        assert not path.exists()
        (state,) = tmp_path.glob("rows.jsonl.*.state")
        num_bytes = state.stat().st_size
        assert f"1 kept .state, {num_bytes / 1e6:,.1f} MB" in stopped.output
        assert len(json.loads(torch.load(state)["rows"])) == kept
    finished = train(out=path, **options)
    assert finished.exit_code == 0, finished.output
    size = f"1 kept .state, {num_bytes / 1e6:,.1f} MB, removed when done"
    assert f"Going on after epoch 2 of 3; {size}." in finished.output
    assert without_seconds(path) == without_seconds(whole)
    assert not list(tmp_path.glob("*.state"))


def test_without_a_file_nothing_is_kept_and_that_is_said(monkeypatch):
    Stop(monkeypatch, 5)
    result = train()
    assert result.exit_code == 130
    assert "with --out whole epochs are" in result.output


def test_a_state_that_cannot_be_used_is_told_and_the_run_begins_anew(
    tmp_path, monkeypatch
):
    path = tmp_path / "rows.jsonl"
    for damage, words in (
        (lambda state: state.write_bytes(b"no state"), "cannot be read"),
        (_made_elsewhere, "was made with another torch, not"),
    ):
        with monkeypatch.context() as patch:
            Stop(patch, 5)
            train(out=path)
        (state,) = tmp_path.glob("*.state")
        damage(state)
        result = train(out=path)
        assert result.exit_code == 0
        assert words in " ".join(result.output.split())
        assert "begins anew" in " ".join(result.output.split())
        assert [row["epoch"] for row in rows(path)] == [1, 2]
        path.unlink()


def _made_elsewhere(path):
    state = torch.load(path)
    torch.save(state | {"made_with": "another torch"}, path)


def test_a_disk_that_is_full_when_a_run_ends_loses_nothing_of_it(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("dome_lab.paper.rows.append_bytes", full_disk)
        result = train(out=path)
    assert result.exit_code == 1
    assert "disk full" in result.output
    assert result.output.splitlines()[-1].startswith("dome: ")
    assert not path.exists()
    monkeypatch.setattr(Arm, "step", None)  # nothing is computed again
    again = train(out=path)
    assert again.exit_code == 0, again.output
    assert [row["epoch"] for row in rows(path)] == [1, 2]


def full_disk(path, content):
    raise DiskFullError(f"disk full: {path}")


def test_the_same_run_twice_at_once_is_refused_another_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    refused = []
    take = Arm.step

    def step(arm):
        if not refused:
            refused.append(None)
            refused[0] = train(out=path)
            assert train(out=path, seed=1).exit_code == 0
        return take(arm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arm, "step", step)
        assert train(out=path).exit_code == 0
    assert refused[0].exit_code == 1
    assert f"in use by process {os.getpid()}" in " ".join(refused[0].output.split())
    assert sorted((row["seed"], row["epoch"]) for row in rows(path)) == [
        *((0, 1), (0, 2)),
        *((1, 1), (1, 2)),
    ]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nof years\n")
    result = train(out=path)
    assert result.exit_code == 2
    assert "has no rows in it" in result.output
    assert path.read_text() == "my notes\nof years\n"
