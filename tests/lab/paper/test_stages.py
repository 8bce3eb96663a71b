from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_figure

from dome_lab.paper.reproduce import compute, conclude, make_plan

NAME = "ext90_staged"
FIRST = tiny_figure.runs(tiny_figure.Config(num_seeds=1, epochs=1))
SECOND = [replace(run, seed=5) for run in FIRST]
THIRD = [replace(run, seed=6) for run in FIRST]


def later_runs(found):
    """The second runs once the first are there, the third once those are."""
    wanted = SECOND if found.keys() >= set(FIRST) else []
    return [*wanted, *THIRD] if found.keys() >= set(SECOND) else wanted


def staged_figure():
    names = ("SCALES", "compute_run", "draw", "judge", "__doc__")
    return SimpleNamespace(
        **{name: getattr(tiny_figure, name) for name in names},
        runs=lambda config: FIRST,
        later_runs=lambda config, found: later_runs(found),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_figure_goes_through_its_stages_in_one_go_and_again_after_a_stop(tmp_path):
    figure = {NAME: staged_figure()}
    plan = make_plan(figure, "smoke", tmp_path)
    assert [job.run for job in plan.missing] == FIRST
    # The figure knows of more as soon as some are over.
    done = [e.job.run for e in compute(plan, num_workers=2) if e.stored]
    assert set(done) == {*FIRST, *SECOND, *THIRD}
    assert len(done) == 6
    assert plan.figures[0].num_missing(plan.found) == 0
    assert conclude(plan.figures[0], plan.found).claims[0].numbers == {"rows": 6.0}
    rows = tmp_path / f"{NAME}.jsonl"
    cut_off_the_last(rows)
    again = make_plan(figure, "smoke", tmp_path)
    assert [job.run for job in again.missing] == [done[-1]]


def cut_off_the_last(path: Path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
