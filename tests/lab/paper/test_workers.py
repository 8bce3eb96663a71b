import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_jobs

from dome_lab.paper.workers import Later, WorkerError, available_cores, run_all


def test_every_job_yields_its_results_in_order_and_then_its_end():
    events = list(run_all(range, [3, 1, 2], num_workers=2))
    for job in (3, 1, 2):
        mine = [result for name, result in events if name == job]
        assert mine == [*range(job), None]


def test_no_jobs_start_no_process():
    assert list(run_all(range, [], num_workers=2)) == []


def test_a_failure_shows_its_message_and_where_it_was():
    with pytest.raises(WorkerError, match="TypeError: 'str' object") as caught:
        list(run_all(range, ["x"], num_workers=1))
    assert "Traceback" in caught.value.__notes__[0]


def test_a_process_that_dies_is_named_and_not_waited_for():
    with pytest.raises(WorkerError, match="the process of 3 ended unexpectedly"):
        list(run_all(os._exit, [3], num_workers=1))


def test_leaving_early_ends_the_processes(forked_workers):
    events = run_all(range, [10**9, 10**9], num_workers=2)
    next(events)
    events.close()
    assert multiprocessing.active_children() == []


def test_a_job_that_does_not_fit_beside_others_waits_for_its_turn(forked_workers):
    def fits(job, busy):
        return not (job.startswith("long") and any(b.startswith("long") for b in busy))

    jobs = ["long one", "long other", "short"]
    events = run_all(tiny_jobs.wait_a_moment, jobs, 2, fits)
    started = [job for job, result in events if result is not None]
    assert started == ["short", "long one", "long other"]


def test_jobs_that_come_up_on_the_way_are_done_before_those_that_wait(forked_workers):
    asked = iter([[5], [], []])
    events = run_all(range, [1, 2], num_workers=1, more=lambda: next(asked))
    assert [job for job, result in events if result is None] == [1, 5, 2]


def test_a_job_for_later_is_put_back_behind_the_others(forked_workers, tmp_path):
    jobs = [str(tmp_path / "late"), "other"]
    events = list(run_all(tiny_jobs.second_time, jobs, num_workers=1))
    assert [job for job, result in events if result is None] == ["other", jobs[0]]
    (later,) = [result for _, result in events if isinstance(result, Later)]
    assert str(later) == "not yet"


def test_a_message_for_users_is_passed_on_with_its_job_and_nothing_else(forked_workers):
    with pytest.raises(WorkerError) as caught:
        list(run_all(tiny_jobs.refuse, [3], num_workers=1))
    assert str(caught.value) == "3: nothing is left of 3"


def test_ctrl_c_while_processes_start_is_not_lost(monkeypatch):
    start = multiprocessing.get_context("spawn").Process.start

    def interrupted(process):
        start(process)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run_all(range, [10**9, 10**9], num_workers=2))
    # Those of the tests before may still be on their way out; a lost one works on.
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def test_processes_do_not_see_ctrl_c(forked_workers):
    events = run_all(tiny_jobs.process_id_and_wait, [1], num_workers=1)
    _, pid = next(events)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert is_alive(pid)
    events.close()


def started(job, jobs):
    code = (
        "import tiny_jobs; from dome_lab.paper.workers import run_all\n"
        f"for _, pid in run_all(tiny_jobs.{job}, {jobs}, 2):\n"
        "    print(pid, flush=True)\n"
    )
    here = str(Path(tiny_jobs.__file__).parent)
    before = os.environ.get("PYTHONPATH", "")
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([here, before])},
    )


def test_a_lock_of_a_library_is_not_told_as_leaked():
    said, warned = started("hold_a_lock", [1]).communicate()
    assert len(said.split()) == 2  # the process, and the end of the job
    assert "leaked" not in warned


def test_processes_end_when_this_one_is_killed():
    parent = started("process_id_and_wait", [1, 2])
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, "the processes live on"
        time.sleep(0.05)


def is_alive(pid):
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")


def test_at_least_one_core_is_available():
    assert available_cores() >= 1
