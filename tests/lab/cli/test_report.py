import pytest
from made_rows import write_arms
from typer.testing import CliRunner

from dome_lab.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_page_is_written_beside_the_rows_and_its_path_printed(tmp_path):
    rows = write_arms(tmp_path / "rows.jsonl")
    for given in (rows, tmp_path):
        page = tmp_path / "report.html"
        page.unlink(missing_ok=True)
        result = run(given)
        assert result.exit_code == 0, result.output
        assert result.output == f"Report: {page}\n"
        assert page.read_text().startswith("<!doctype html>")


def test_place_and_title_can_be_chosen(tmp_path):
    rows = write_arms(tmp_path / "rows.jsonl")
    page = tmp_path / "new" / "page.html"
    assert run(rows, "--out", page, "--title", "<b>mine</b>").exit_code == 0
    assert "<title>&lt;b&gt;mine&lt;/b&gt;</title>" in page.read_text()


@pytest.mark.parametrize("content", [None, "", "not JSON\n", "{}\n", "[1]\n"])
def test_bad_rows_are_one_line_and_leave_no_page(tmp_path, content):
    rows = tmp_path / "rows.jsonl"
    if content is not None:
        rows.write_text(content)
    result = run(rows)
    assert result.exit_code == 2
    assert result.output.startswith("dome: ")
    assert str(rows) in result.output
    assert result.output.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path != rows]


def test_a_folder_for_a_page_is_refused(tmp_path):
    rows = write_arms(tmp_path / "rows.jsonl")
    result = run(rows, "--out", tmp_path)
    assert result.exit_code == 2
    assert "is a folder: give a file" in result.output


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path):
    rows = write_arms(tmp_path / "rows.jsonl")
    result = run(rows, "--out", rows / "page.html")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1


def test_without_rows_there_is_nothing_to_do():
    result = run()
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
