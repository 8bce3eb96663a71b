import json
from io import StringIO

import pytest
from rich.console import Console

from dome_lab.bench import run
from dome_lab.bench.questions import (
    load,
    memory,
    question_names,
    soak,
    step_cost,
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    names, told = question_names(), []
    few = soak.SCALES | {"smoke": soak.Config(num_updates=50)}  # see test_soak.py
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "SCALES", few)
        answers = run.ask(names, "smoke", folder, lambda what, done: told.append(done))
        yield folder, {answer.question: answer for answer in answers}, told


def rows_of(asked, name):
    return json.loads((asked[0] / f"{name}.json").read_text())["rows"]


def test_the_headline_comes_first():
    assert question_names()[0] == "step_cost"


@pytest.mark.parametrize("name", question_names())
def test_every_question_has_every_scale_and_asks_something(name):
    question = load(name)
    assert set(question.SCALES) == {"smoke", "quick", "usual", "full"}
    assert question.__doc__.splitlines()[0].endswith("?")
    for scale in ("quick", "usual", "full"):
        assert question.expected_seconds(question.SCALES[scale]) > 0


def test_the_quick_headline_takes_less_than_a_minute():
    assert run.expected_seconds(["step_cost"], "quick") < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", question_names())
def test_every_answer_is_written_with_what_made_it(asked, name):
    folder, answers, _ = asked
    stored = json.loads((folder / f"{name}.json").read_text())
    assert stored["question"] == name
    assert stored["rows"]
    assert {"commit", "cores", "dome", "processor", "threads", "torch"} <= set(
        stored["machine"]
    )
    table = answers[name].table
    assert all(len(row) == len(table.headings) for row in table.rows)
    assert (folder / f"{name}.md").read_text() == table.markdown()
    assert all(path.exists() for path in answers[name].paths)
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_progress_never_goes_back(asked):
    told = asked[2]
    assert told == sorted(told)
    assert told[-1] == run.expected_seconds(question_names(), "smoke")


@pytest.mark.slow
def test_embeddings_compares_ours_with_the_plain_step(asked):
    plain, ours = rows_of(asked, "embeddings")
    assert plain["ratio"] == 1.0 < ours["ratio"]


def test_step_cost_compares_every_variant_with_the_plain_step(asked):
    rows = {row["variant"]: row for row in rows_of(asked, "step_cost")}
    assert tuple(rows) == step_cost.VARIANTS
    assert rows[step_cost.PLAIN]["ratio"] == 1.0
    assert rows[step_cost.PAPER]["gain"] == 1.0
    assert all(len(row["seconds"]) == row["num_rounds"] for row in rows.values())


def test_the_headline_fits_a_terminal_of_80_columns():
    wide = {"median": 0.0374, "ratio": 12.4, "ratio_low": 11.06, "ratio_high": 13.59}
    more = {"batch_size": 128, "target": 2.8, "gain": 12.4}
    rates = {"sgemm": 2e11, "sgemm_low": 2e11, "sgemm_high": 2e11}
    rows = [wide | more | rates | {"variant": name} for name in step_cost.VARIANTS]
    console = Console(width=80, file=StringIO())
    console.print(step_cost.table(rows).rich())
    lines = console.file.getvalue().splitlines()
    assert len([line for line in lines if line.startswith("  128 ")]) == len(rows)
    assert len(lines) == len(rows) + 6  # no cell takes two lines


@pytest.mark.slow
def test_loops_in_processes_of_their_own_are_compared_with_the_plain_one(asked):
    plain, thin = rows_of(asked, "alone")
    assert (plain["variant"], thin["variant"]) == (step_cost.PLAIN, step_cost.THIN)
    assert plain["ratio"] == 1.0
    assert thin["ratio"] == thin["seconds"][0] / plain["seconds"][0]


@pytest.mark.slow
def test_memory_is_held_against_the_floor_and_the_plan(asked):
    (row,) = rows_of(asked, "memory")
    assert row["floor"] == 4 * row["dim"] * (row["rank"] + row["batch_size"])
    assert row["allowed"] == 1.25 * row["floor"]
    assert row["highest"] >= row["filtered"] > 0
    assert row["predicted"] > row["floor"]


def test_without_opacus_the_recipe_is_left_out_and_the_table_says_so(monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("opacus")

    monkeypatch.setattr(step_cost, "attach_paper_recipe", missing)
    monkeypatch.setattr(memory, "grad_sample_module", missing)
    rows = step_cost.compute(step_cost.SCALES["smoke"], lambda what, share: None)
    assert step_cost.PAPER not in {row["variant"] for row in rows}
    assert "opacus is missing" in " ".join(step_cost.table(rows).notes).lower()
    case = memory.Case(setting="resnet8", batch_size=5, rank=3, method=memory.PAPER)
    rows = memory.compute(memory.Config(cases=[case]), lambda what, share: None)
    assert "opacus is missing" in memory.table(rows).notes[0]


def test_a_case_that_does_not_fit_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**30)
    rows = memory.compute(
        memory.Config(cases=memory.LARGE[:1]), lambda what, share: None
    )
    (note,) = memory.table(rows).notes
    assert note.endswith("17.2 GB needed, 1.07 GB available.")
