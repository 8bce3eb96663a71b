import json
import threading
from dataclasses import replace

import pytest
import tiny_figure
import torch

from dome.files import DiskFullError
from dome_lab.paper import jobs
from dome_lab.paper.jobs import Job, StateFile, compute_jobs, digest_of
from dome_lab.paper.lock import locked
from dome_lab.paper.rows import append_run, read_rows
from dome_lab.paper.spectrum import compute_spectrum
from dome_lab.paper.train import compute_run
from dome_lab.paper.workers import Later, WorkerError

RUN = replace(tiny_figure.runs(tiny_figure.SCALES["smoke"])[0], epochs=3)
JOB = Job("fig90", RUN, compute_run)


def paths(folder):
    return {"fig90": folder / "fig90.jsonl"}


def computed(folder, job=JOB):
    return list(jobs._stored_rows(paths(folder), job))


def stopped_after(folder, num_epochs, job=JOB):
    """Leave a run behind so many epochs, as a kill would."""
    state = StateFile(folder / f".{digest_of(job.key)}.state")
    keep, left = state.keep, [num_epochs]

    def keep_some(*arguments):
        keep(*arguments)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    state.keep = keep_some
    with pytest.raises(KeyboardInterrupt):
        list(job.compute(job.run, keeper=state))
    return state.path


def without_seconds(rows):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    computed(folder)
    return without_seconds(read_rows(folder / "fig90.jsonl"))


def test_a_run_that_was_stopped_resumes_with_the_same_rows(tmp_path, whole):
    stopped_after(tmp_path, 2)
    *events, last = computed(tmp_path)
    assert len(events) == RUN.epochs  # those of before are told again
    assert without_seconds(last.rows) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["fig90.jsonl"]


def test_a_spectrum_resumes_in_the_middle_of_its_training(tmp_path):
    job = Job("fig90", replace(RUN, rank=None), compute_spectrum)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    computed(undisturbed, job)
    stopped_after(tmp_path, 2, job)
    computed(tmp_path, job)
    rows, expected = (
        without_seconds(read_rows(folder / "fig90.jsonl"))
        for folder in (tmp_path, undisturbed)
    )
    assert rows == expected


@pytest.mark.parametrize("made_with", ["another commit", None])
def test_a_state_of_other_code_is_refused_and_says_what_to_do(tmp_path, made_with):
    path = stopped_after(tmp_path, 1)
    if made_with is None:
        path.write_bytes(b"broken")
    else:
        torch.save(torch.load(path) | {"made_with": made_with}, path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="go on with that code, or delete the file"):
        computed(tmp_path)
    assert path.read_bytes() == before


def test_a_state_names_the_commit_that_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_code", lambda: "commit abc")
    path = stopped_after(tmp_path, 1)
    assert torch.load(path)["made_with"] == "commit abc, 1 threads"


def test_a_disk_that_fills_while_a_state_is_written_keeps_the_one_before(
    tmp_path, monkeypatch, whole
):
    path = stopped_after(tmp_path, 1)
    before = path.read_bytes()
    save = torch.save

    def full(state, file):
        file.write(b"some of it")
        file.error = OSError(28, "No space left on device")
        raise file.error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(DiskFullError, match="free some space"):
            computed(tmp_path)
    assert torch.save is save
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))
    assert without_seconds(computed(tmp_path)[-1].rows) == whole


def test_a_run_that_somebody_stored_meanwhile_is_not_computed(tmp_path):
    rows = [RUN.columns() | {"epoch": e + 1, "seconds": 2.0} for e in range(3)]
    append_run(tmp_path / "fig91.jsonl", rows)
    (event,) = compute_jobs([JOB], paths(tmp_path), num_workers=1)
    assert len(event.stored) == 3
    assert event.seconds == 6.0
    assert not (tmp_path / "fig90.jsonl").exists()


def test_a_run_that_somebody_computes_is_left_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LATER", 0.0)
    with (
        locked(tmp_path, f".{digest_of(JOB.key)}.lock"),
        pytest.raises(Later, match="in use by process"),
    ):
        computed(tmp_path)


def test_what_a_killed_process_left_of_a_write_is_cut_off_before_more_is_added(
    tmp_path, whole
):
    path = tmp_path / "fig90.jsonl"
    other = replace(RUN, seed=7).columns()
    path.write_text(json.dumps(other | {"epoch": 1})[:-5])
    computed(tmp_path)
    assert without_seconds(read_rows(path)) == whole


def test_a_run_that_a_machine_without_our_locks_stored_is_stored_once(tmp_path):
    events = jobs._stored_rows(paths(tmp_path), JOB)
    first, _ = next(events)
    other = [first | {"epoch": e + 1, "train_loss": 7.0} for e in range(3)]
    append_run(tmp_path / "fig90.jsonl", other)
    *_, last = events
    assert [row["train_loss"] for row in last.rows] == [7.0] * 3
    assert len(read_rows(tmp_path / "fig90.jsonl")) == 3


@pytest.mark.slow
def test_two_commands_on_one_folder_compute_every_run_once(tmp_path, forked_workers):
    wanted = [Job("fig90", replace(RUN, seed=s), compute_run) for s in range(4)]
    seen, waited = [], []

    def work():
        for event in compute_jobs(wanted, paths(tmp_path), num_workers=1):
            if event.row is not None:
                seen.append((event.job, event.row["epoch"]))
            waited.append(event.elsewhere)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen, key=str) == sorted(
        ((job, e) for job in wanted for e in (1, 2, 3)), key=str
    )
    stored = read_rows(tmp_path / "fig90.jsonl")
    assert sorted((row["seed"], row["epoch"]) for row in stored) == [
        (seed, epoch) for seed in range(4) for epoch in (1, 2, 3)
    ]
    assert any("in use by process" in words for words in waited)


def test_a_job_that_gives_no_rows_is_named(tmp_path, forked_workers):
    job = Job("fig90", RUN, no_rows)
    with pytest.raises(WorkerError, match="the run gave no rows"):
        list(compute_jobs([job], paths(tmp_path), num_workers=1))


def no_rows(run):
    yield from ()
