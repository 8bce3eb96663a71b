import json
from dataclasses import replace

import pytest
from made_rows import FILTERED, run_rows, write_arms, write_loose

from dome_lab.paper.claims import HOLDS, Claim, write_claims
from dome_lab.paper.lock import locked
from dome_lab.paper.rows import append_run, record_session
from dome_lab.report.sections import file_sections


def test_runs_of_several_files_stand_side_by_side_each_once(tmp_path):
    first = write_arms(tmp_path / "a.jsonl")
    second = write_arms(tmp_path / "b.jsonl", shifts=(0.0,) * 4)
    (section,) = file_sections([first, second, first])
    assert len(section.trials) == 8
    ends = {
        t.seed: t.rows[-1]["test_accuracy"]
        for t in section.trials
        if t.settings["rank"]
    }
    assert ends == {0: 0.69, 1: 0.7, 2: pytest.approx(0.71), 3: 0.7}


def test_a_folder_gives_a_section_a_figure_with_its_claims(tmp_path):
    for name in ("fig02_two", "fig01_one"):
        path = write_arms(tmp_path / f"{name}.jsonl")
        record_session(path, {"figure": name, "caption": f"About {name}."})
    claim = Claim("fig02", "n", "s", HOLDS, {"x": 1.0}, "e")
    write_claims(tmp_path / "claims.json", [claim])
    one, two = file_sections([tmp_path])
    assert (one.name, two.name) == ("fig01_one", "fig02_two")
    assert two.caption == "About fig02_two."
    assert (list(one.claims), list(two.claims)) == ([], [claim])
    assert file_sections([tmp_path.parent / tmp_path.name / ".." / tmp_path.name])


def test_a_figure_is_lent_the_unfiltered_runs_of_another(tmp_path):
    record_session(write_arms(tmp_path / "fig01_a.jsonl"), {"figure": "fig01_a"})
    other = tmp_path / "fig02_b.jsonl"
    append_run(other, run_rows(replace(FILTERED, rank=3), 0.6))
    record_session(other, {"figure": "fig02_b"})
    _, second = file_sections([tmp_path])
    assert [t.settings["rank"] for t in second.trials] == [3, None, None, None]


def test_rows_of_another_loop_are_runs_by_file_column_and_seed(tmp_path):
    rows = [{"step": s, "loss": 1.0, "run": r, "seed": 1} for r in "ab" for s in (1, 2)]
    named = write_loose(tmp_path / "named.jsonl", rows)
    bare = write_loose(tmp_path / "bare.jsonl", [{"step": 1, "loss": 2.0}])
    (section,) = file_sections([named, bare])
    found = [(t.settings["run"], t.seed, len(t.rows)) for t in section.trials]
    assert found == [("a", 1, 2), ("b", 1, 2), ("bare", 0, 1)]


def test_what_is_unfinished_is_left_out_and_noted(tmp_path):
    path = write_arms(tmp_path / "rows.jsonl")
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-2]) + whole[-2][:30])
    (section,) = file_sections([path])
    assert len(section.trials) == 5
    assert section.notes == [
        "rows.jsonl: 2 rows of runs that are not finished were left out."
    ]
    assert section.name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("not JSON\n", "line 1: not JSON"),
        ("\x00\x01\n{}", "has no finished run"),
        ("[1]\n", "line 1: a row is a JSON object"),
        ("{}\n", "has no finished run"),
    ],
)
def test_what_is_not_rows_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        file_sections([path])
    assert str(path) in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n\xff\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        file_sections([path])


def test_a_broken_line_of_ours_is_noted_and_left_where_it_is(tmp_path):
    path = write_arms(tmp_path / "rows.jsonl")
    whole = path.read_text().splitlines(keepends=True)
    text = "".join([*whole[:1], "broken\n", *whole[1:]])
    path.write_text(text)
    (section,) = file_sections([path])
    assert len(section.trials) == 6  # the run around it lacks nothing
    assert section.notes == ["rows.jsonl, line 2 cannot be read; the rest is used."]
    assert path.read_text() == text


def test_a_broken_line_of_another_loop_is_noted_and_left_where_it_is(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    (section,) = file_sections([path])
    assert len(section.trials[0].rows) == 2
    assert section.notes == ["own.jsonl, line 2 cannot be read; the rest is used."]
    assert path.read_text() == '{"step": 1}\n{"step\n{"step": 3}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_others_among_ours_are_noted_and_not_charted(tmp_path):
    path = write_arms(tmp_path / "rows.jsonl")
    with path.open("a") as file:
        file.write('{"step": 1, "train_loss": 9.0}\n{"epoch": 2, "loss": 3.0}\n')
    (section,) = file_sections([path])
    assert all(trial.known for trial in section.trials)
    assert len(section.trials) == 6
    assert section.notes == [
        "rows.jsonl: 2 rows that are not of dome were left out: keep them in a file of "
        "their own."
    ]


def test_a_file_that_somebody_writes_to_is_only_read(tmp_path):
    path = write_arms(tmp_path / "rows.jsonl")
    with path.open("a") as file:
        file.write('broken\n{"half')
    before = path.read_bytes()
    with locked(tmp_path):
        (section,) = file_sections([path])
    assert section.notes == ["rows.jsonl, line 25 cannot be read; the rest is used."]
    assert path.read_bytes() == before


def test_a_run_cut_short_is_no_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_run(path, run_rows(FILTERED, 0.5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="has no finished run"):
        file_sections([path])


def test_a_wrong_path_is_refused_with_the_nearest_name(tmp_path):
    write_arms(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"did you mean .*rows\.jsonl"):
        file_sections([tmp_path / "row.jsonl"])
    with pytest.raises(ValueError, match="no file or folder"):
        file_sections([tmp_path / "nowhere" / "row.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no files of rows"):
        file_sections([tmp_path / "empty"])


@pytest.mark.parametrize("broken", ["{", "[1]", '[{"figure": "fig01"}]', '{"a": 1}'])
def test_broken_verdicts_are_refused_by_name(tmp_path, broken):
    path = write_arms(tmp_path / "rows.jsonl")
    (tmp_path / "claims.json").write_text(broken)
    with pytest.raises(ValueError, match=r"claims\.json is not a list of claims"):
        file_sections([path])


def test_an_unknown_verdict_is_refused(tmp_path):
    path = write_arms(tmp_path / "rows.jsonl")
    claim = {"figure": "f", "name": "", "statement": "", "verdict": "maybe"}
    claim |= {"numbers": {}, "explanation": ""}
    (tmp_path / "claims.json").write_text(json.dumps([claim]))
    with pytest.raises(ValueError, match="no verdict is called 'maybe'"):
        file_sections([path])


@pytest.mark.parametrize("broken", ["{", "[]"])
def test_broken_notes_are_refused_by_name(tmp_path, broken):
    path = write_arms(tmp_path / "rows.jsonl")
    (tmp_path / "rows.meta.json").write_text(broken)
    with pytest.raises(ValueError, match=r"rows\.meta\.json is not"):
        file_sections([path])
