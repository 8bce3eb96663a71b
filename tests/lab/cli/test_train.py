import json

import pytest
from typer.testing import CliRunner

from dome_lab.cli import app

SMALL = {
    "--num-train": 64,
    "--num-test": 20,
    "--batch-size": 16,
    "--epochs": 2,
    "--rank": 3,
    "--rate": 10,
}


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
