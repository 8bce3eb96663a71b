import multiprocessing
import os

import pytest

from dome.paper.workers import WorkerError, available_cores, run_all


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


def test_leaving_early_ends_the_processes():
    events = run_all(range, [10**9, 10**9], num_workers=2)
    next(events)
    events.close()
    assert multiprocessing.active_children() == []


def test_at_least_one_core_is_available():
    assert available_cores() >= 1
