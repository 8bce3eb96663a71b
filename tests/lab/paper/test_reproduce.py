import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_figure

from dome_lab.paper.claims import HOLDS, Claim
from dome_lab.paper.reproduce import (
    CLAIMS_FILE,
    compute,
    conclude,
    make_plan,
    read_samples,
)
from dome_lab.paper.rows import append_run, read_rows
from dome_lab.paper.workers import WorkerError

NAME = tiny_figure.NAME
pytestmark = pytest.mark.usefixtures("only_forked_workers")
TINY = {NAME: tiny_figure}


def fake_rows(run):
    columns = run.columns()
    return [columns | {"epoch": e + 1, "train_loss": 1.0} for e in range(run.epochs)]


def changed(**changes):
    names = ("SCALES", "runs", "compute_run", "draw", "judge", "__doc__")
    module = {name: getattr(tiny_figure, name) for name in names}
    return SimpleNamespace(**module | changes)


def stored(folder):
    rows = [row for path in folder.glob("*.jsonl") for row in read_rows(path)]
    return sorted(
        json.dumps({k: v for k, v in row.items() if "seconds" not in k}) for row in rows
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, only_forked_workers):
    folder = tmp_path_factory.mktemp("undisturbed")
    plan = make_plan(TINY, "smoke", folder)
    events = list(compute(plan, num_workers=2))
    return folder, plan, events


def test_every_run_is_computed_and_stored(undisturbed):
    folder, plan, events = undisturbed
    assert len(plan.missing) == 4
    assert sum(event.row is not None for event in events) == 8
    assert {event.job for event in events if event.stored} == set(plan.missing)
    assert len(stored(folder)) == 8
    assert make_plan(TINY, "smoke", folder).missing == ()


def test_provenance_lies_beside_the_rows(undisturbed):
    folder, _, _ = undisturbed
    noted = json.loads((folder / f"{NAME}.meta.json").read_text())
    assert noted["caption"] == "Two arms on a few digits."
    assert noted["scale"] == "smoke"
    assert noted["config"]["num_seeds"] == 2
    assert noted["made_with"][0]["device"]


def test_a_finished_figure_is_drawn_and_judged(undisturbed):
    folder, plan, _ = undisturbed
    conclusion = conclude(plan.figures[0], plan.found)
    assert [path.suffix for path in conclusion.pictures] == [".png", ".pdf"]
    png, pdf = (path.read_bytes() for path in conclusion.pictures)
    assert png.startswith(b"\x89PNG")
    assert pdf.startswith(b"%PDF")
    assert conclusion.seconds > 0
    (claim,) = json.loads((folder / CLAIMS_FILE).read_text())
    assert claim["numbers"] == {"rows": 8}
    assert not list(folder.glob("*.tmp"))


def test_the_same_rows_give_the_same_files(undisturbed):
    _, plan, _ = undisturbed
    first = [p.read_bytes() for p in conclude(plan.figures[0], plan.found).pictures]
    again = [p.read_bytes() for p in conclude(plan.figures[0], plan.found).pictures]
    assert first == again


@pytest.mark.parametrize(
    ("lost", "num_rows"), [((), 16), ((7,), 12), ((2,), 12), ((6, 7), 12)]
)
def test_seeds_that_have_all_their_runs_are_enough(lost, num_rows, tmp_path):
    asked = {"smoke": tiny_figure.Config(num_seeds=4)}
    module = {NAME: changed(SCALES=asked)}
    plan = make_plan(module, "smoke", tmp_path)
    assert [job.run.seed for job in plan.missing] == [0, 0, 1, 1, 2, 2, 3, 3]
    for place, job in enumerate(plan.missing):
        if place not in lost:
            append_run(plan.figures[0].rows_path, fake_rows(job.run))
    plan = make_plan(module, "smoke", tmp_path)
    conclusion = conclude(plan.figures[0], plan.found)
    assert conclusion.claims[0].numbers == {"rows": num_rows}
    assert conclusion.parts.lacks_seeds == bool(lost)
    assert len(conclusion.parts.notes) == bool(lost)


def test_two_seeds_of_four_are_not_enough(tmp_path):
    asked = {"smoke": tiny_figure.Config(num_seeds=4)}
    plan = make_plan({NAME: changed(SCALES=asked)}, "smoke", tmp_path)
    for job in plan.missing[:-3]:
        append_run(plan.figures[0].rows_path, fake_rows(job.run))
    plan = make_plan({NAME: changed(SCALES=asked)}, "smoke", tmp_path)
    with pytest.raises(ValueError, match="lacks 3 runs: compute them first"):
        conclude(plan.figures[0], plan.found)


def test_claims_of_other_figures_stay(tmp_path):
    folder = tmp_path
    for name in ("ext01_late", "fig91_other", "fig92_third"):
        claim = Claim(name[:5], "is there", "It is.", HOLDS, {}, "")
        module = changed(judge=lambda rows, claim=claim: [claim])
        plan = make_plan({name: module}, "smoke", folder)
        for job in plan.missing:
            append_run(plan.figures[0].rows_path, fake_rows(job.run))
        plan = make_plan({name: module}, "smoke", folder)
        conclude(plan.figures[0], plan.found)
        conclude(plan.figures[0], plan.found)
    claims = json.loads((folder / CLAIMS_FILE).read_text())
    assert [c["figure"] for c in claims] == ["fig91", "fig92", "ext01"]


def test_figures_share_the_runs_they_have_in_common(tmp_path):
    larger = {
        **TINY,
        "fig91_larger": changed(SCALES={"smoke": tiny_figure.Config(num_seeds=3)}),
    }
    plan = make_plan(larger, "smoke", tmp_path)
    assert [job.figure for job in plan.missing] == [NAME] * 4 + ["fig91_larger"] * 2
    for job in plan.missing[:4]:
        append_run(tmp_path / f"{NAME}.jsonl", fake_rows(job.run))
    alone = make_plan({"fig91_larger": larger["fig91_larger"]}, "smoke", tmp_path)
    assert len(alone.missing) == 2


def test_rows_of_another_kind_are_no_substitute(tmp_path):
    plan = make_plan(TINY, "smoke", tmp_path)
    for job in plan.missing:
        append_run(tmp_path / "fig99_x.jsonl", fake_rows(job.run), made_by="spectrum")
    assert len(make_plan(TINY, "smoke", tmp_path).missing) == 4


def test_a_figure_that_lacks_runs_is_not_drawn(tmp_path):
    plan = make_plan(TINY, "smoke", tmp_path)
    with pytest.raises(ValueError, match=f"{NAME} lacks 4 runs"):
        conclude(plan.figures[0], plan.found)


def test_parts_that_are_computed_are_drawn_before_the_others_are(tmp_path):
    def by_rate(config):
        return [replace(config, rates=(rate,)) for rate in config.rates]

    module = {NAME: changed(parts=by_rate)}
    plan = make_plan(module, "cpu", tmp_path)
    first = [job for job in plan.missing if job.run.rate is None]
    for job in [*first, plan.missing[-1]]:
        append_run(tmp_path / f"{NAME}.jsonl", fake_rows(job.run))
    plan = make_plan(module, "cpu", tmp_path)
    conclusion = conclude(plan.figures[0], plan.found)
    assert str(conclusion.parts) == "1 of 2"
    assert set(conclusion.parts.jobs) == set(first)
    (claim,) = conclusion.claims
    assert claim.numbers == {"rows": len(first) * len(fake_rows(first[0].run))}
    noted = json.loads((tmp_path / f"{NAME}.meta.json").read_text())
    assert noted["parts"] == "1 of 2"


def test_samples_are_checked_before_anything_is_computed(tmp_path):
    def runs(config):
        return [
            replace(r, batch_size=1400, num_train=None)
            for r in tiny_figure.runs(config)
        ]

    plan = make_plan({NAME: changed(runs=runs)}, "smoke", tmp_path)
    with pytest.raises(WorkerError, match=r"^digits: batch_size 1400 is more than"):
        list(read_samples(plan))


def test_samples_are_read_once_for_all_their_runs(tmp_path):
    plan = make_plan(TINY, "smoke", tmp_path)
    assert [str(samples) for samples in read_samples(plan)] == ["digits"]


@pytest.mark.parametrize("limit", [1, {"smoke": 1}])
def test_large_runs_are_not_started_beside_each_other(tmp_path, limit):
    plan = make_plan({NAME: changed(MAX_JOBS=limit)}, "smoke", tmp_path)
    order = [event.job for event in compute(plan, num_workers=2)]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == 3  # four runs, one after the other


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_rows(undisturbed, tmp_path):
    folder, _, _ = undisturbed
    rows = tmp_path / f"{NAME}.jsonl"
    ends = [
        killed_after(start(tmp_path), rows, *moment)
        for moment in ((0, 0.0), (2, 0.02))  # test_kills.py has the writes themselves
    ]
    assert ends.count(-signal.SIGKILL) >= 1  # else it was never stopped on its way
    process = start(tmp_path, num_workers=1)
    assert process.wait(timeout=600) == 0
    assert stored(tmp_path) == stored(folder)


def killed_after(process, path, num_rows, delay):
    wait_until(lambda: process.poll() is not None or lines(path) >= num_rows)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return process.wait()


def start(folder, num_workers=2):
    code = (
        "import sys, pathlib, tiny_figure\n"
        "from dome_lab.paper.reproduce import compute, make_plan\n"
        "modules = {tiny_figure.NAME: tiny_figure}\n"
        "plan = make_plan(modules, 'smoke', pathlib.Path(sys.argv[1]))\n"
        f"list(compute(plan, {num_workers}))\n"
    )
    here = str(Path(tiny_figure.__file__).parent)
    before = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, before])}
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], env=environment)


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
