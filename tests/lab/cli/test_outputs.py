import json
import math
import os

import pytest
from made_rows import write_arms, write_loose
from typer.testing import CliRunner

from dome_lab.cli import app
from dome_lab.paper.rows import meta_path

MINE = b"my own work of years\n"
SMALL = ["--num-train", "64", "--num-test", "20", "--batch-size", "16", "--epochs", "1"]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def assert_refused(result, *fragments):
    assert result.exit_code != 0
    said = " ".join(result.output.split())
    assert said.startswith("dome: "), said
    assert all(str(fragment) in said for fragment in fragments), said
    assert "Traceback" not in said


@pytest.fixture
def two(tmp_path):
    return [write_arms(tmp_path / f"{name}.jsonl") for name in "ab"]


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_a_page_never_replaces_the_rows_it_is_made_of(two, tmp_path, more):
    linked = tmp_path / "link.jsonl"
    linked.symlink_to(two[0])
    hard = tmp_path / "page.html"
    os.link(two[1], hard)
    before = [path.read_bytes() for path in two]
    for out in (two[1], two[0], linked, hard, tmp_path / ".." / tmp_path.name / two[0]):
        assert_refused(run("report", *two, "--out", out, *more), "--out", "made of")
    assert [path.read_bytes() for path in two] == before


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_nor_what_is_noted_beside_them(two, more):
    meta = meta_path(two[0])
    meta.write_text('{"made_with": []}')
    claims = two[0].with_name("claims.json")
    claims.write_text("[]")
    for out in (meta, claims):
        assert_refused(run("report", *two, "--out", out, *more), out)
    assert meta.read_text() == '{"made_with": []}'


def test_a_page_replaces_a_page_but_another_file_only_by_force(two, tmp_path):
    page = tmp_path / "report.html"
    assert run("report", *two).exit_code == 0
    assert run("report", *two).exit_code == 0
    page.write_bytes(MINE)
    for more in ([], ["--out", page]):
        assert_refused(run("report", *two, *more), page, "--force")
        assert page.read_bytes() == MINE
    assert run("report", *two, "--force").exit_code == 0
    assert page.read_bytes() != MINE


@pytest.mark.parametrize(
    "content", ['{"lr": 0.1}', '{"lr": 0.1}\n', '{"seed": 7, "arm": "plain"}\n' * 3]
)
def test_rows_are_added_to_no_file_without_rows_of_ours(tmp_path, content):
    out = tmp_path / "conf.json"
    out.write_text(content)
    result = run("train", *SMALL, "--model", "relu_mlp", "--out", out)
    assert_refused(result, out, "has no rows")
    assert out.read_text() == content


def test_notes_beside_rows_are_not_written_over_a_file_of_others(tmp_path):
    meta = tmp_path / "rows.meta.json"
    meta.write_text('{"mine": 1}')
    out = tmp_path / "rows.jsonl"
    result = run("train", *SMALL, "--model", "relu_mlp", "--out", out)
    assert_refused(result, meta, "not written by dome")
    assert meta.read_text() == '{"mine": 1}'
    assert not out.exists()


@pytest.mark.parametrize("name", ["rows.jsonl", "report.html", "demo.png"])
@pytest.mark.parametrize("more", [[], ["--fresh"]])
def test_the_demo_leaves_files_of_others_alone(tmp_path, name, more):
    (tmp_path / name).write_bytes(MINE)
    assert_refused(run("demo", "--quick", "--out", tmp_path, *more), tmp_path / name)
    assert (tmp_path / name).read_bytes() == MINE


@pytest.mark.parametrize(
    "name",
    ["fig01_toy.jsonl", "fig01_toy.meta.json", "report.html", "claims.json", "png"],
)
def test_figures_leave_files_of_others_alone(tmp_path, name):
    from dome_lab.paper.figures import figure_names

    (figure, *_) = figure_names()
    name = name.replace("fig01_toy", figure)
    path = tmp_path / "smoke" / (f"{figure}.png" if name == "png" else name)
    path.parent.mkdir()
    content = MINE if path.suffix != ".json" else b'{"mine": 1}'
    path.write_bytes(content)
    result = run("reproduce", figure, "--scale", "smoke", "--out", tmp_path)
    assert_refused(result, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["soak.json", "soak.md"])
def test_bench_leaves_files_of_others_alone(tmp_path, name):
    (tmp_path / name).write_bytes(MINE)
    assert_refused(run("bench", "soak", "--quick", "--out", tmp_path), tmp_path / name)
    assert (tmp_path / name).read_bytes() == MINE


def test_paths_are_printed_as_they_are(tmp_path):
    folder = tmp_path / "[red]a[" / "red] [1, 2]"
    folder.mkdir(parents=True)
    rows = folder / "[bold]rows.jsonl"
    for _ in range(2):
        said = run("train", *SMALL, "--model", "relu_mlp", "--out", rows)
        assert said.exit_code == 0, said.output
        assert str(rows) in said.output
    said = run("report", rows)
    assert said.output == f"Report: {folder / 'report.html'}\n"
    loose = write_loose(folder / "loose.jsonl", [{"step": 1, "loss[/b]": 2.0}])
    assert run("report", loose, "--force").exit_code == 0


HOSTILE = {
    "a large integer": '{"step": 2, "loss": 1' + "0" * 400 + "}",
    "an integer of many digits": '{"step": 2, "loss": 1' + "0" * 9000 + "}",
    "one as the step": '{"step": 1' + "0" * 320 + ', "loss": 1}',
    "a large integer in a list": '{"step": 2, "loss": [1' + "0" * 400 + "]}",
    "a deeply nested list": '{"step": 2, "loss": ' + "[" * 9999 + "]" * 9999 + "}",
    "a nested list": '{"step": 2, "loss": ' + "[" * 300 + "]" * 300 + "}",
    "a deeply nested object": '{"step": 2, "loss": ' + '{"a":' * 900 + "1" + "}" * 901,
    "a surrogate in a name": '{"step": 2, "lo\\ud800ss": 1}',
    "a surrogate in a value": '{"step": 2, "run": "\\udfff"}',
    "half a pair": '{"step": 2, "run": "\\ud83d x"}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("ours", [True, False])
def test_one_bad_line_is_told_and_the_rest_used(tmp_path, line, ours):
    path = tmp_path / "rows.jsonl"
    if ours:
        write_arms(path)
    else:
        write_loose(path, [{"step": s, "loss": 1 / s, "run": "é"} for s in (1, 2)])
    content = path.read_text().splitlines(keepends=True)
    path.write_text("".join([content[0], line + "\n", *content[1:]]))
    result = run("report", path)
    assert result.exit_code == 0, result.output
    assert "rows.jsonl, line 2 cannot be read; the rest is used" in result.output
    assert (tmp_path / "report.html").exists()


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1, "loss": 2.0, "run": "\\ud83d\\ude00"}\n' * 2)
    assert run("report", path).output == f"Report: {tmp_path / 'report.html'}\n"


STRANGE = [None, True, 3, 1.5, "lr", [], {}, [1], [None], [["lr"]], {"a": 1}]


@pytest.mark.parametrize("value", STRANGE, ids=map(repr, STRANGE))
@pytest.mark.parametrize("name", ["chosen", "figure", "caption", "made_with", "what"])
def test_strange_notes_beside_rows_are_no_traceback(tmp_path, name, value):
    rows = write_arms(tmp_path / "rows.jsonl")
    meta_path(rows).write_text(json.dumps({"made_with": [], name: value}))
    result = run("report", rows)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code == 0, result.output


def test_what_was_chosen_must_be_names_of_columns(tmp_path):
    rows = write_arms(tmp_path / "rows.jsonl")
    meta_path(rows).write_text('{"made_with": [], "chosen": [3]}')
    result = run("report", rows)
    assert "chosen" in result.output
    assert "not used" in result.output


KINDS = [None, True, 1e308, -1e200, "x", "[/b]", "</script>", [], ["a"], [None], {}]
KINDS += [{"a": [1]}, [[1]], math.inf, [1e308, 1e308], "\0"]


@pytest.mark.parametrize("value", KINDS, ids=map(repr, KINDS))
@pytest.mark.parametrize("ours", [True, False])
def test_values_of_any_kind_are_no_traceback(tmp_path, value, ours):
    path = write_arms(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not ours:
        rows = [{k: row[k] for k in row.keys() - {"of", "task"}} for row in rows]
    for name in ("epoch", "train_loss", "eigenvalues", "lr", "mine", "run", "step"):
        odd = [row | {name: value} if i % 3 else row for i, row in enumerate(rows)]
        result = run("report", write_loose(path, odd))
        assert result.exit_code in (0, 2), (name, result.exception)
        assert "Traceback" not in result.output
