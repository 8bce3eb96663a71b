import dataclasses

import pytest
import torch
from simulated_device import AVAILABLE, register, simulated_device
from typer.testing import CliRunner

from dome_lab.bench import memory, run, timing
from dome_lab.bench.questions import load
from dome_lab.bench.timing import CudaClock, clock_of
from dome_lab.cli import app

# While tests are collected: once a backward pass has run it is too late.
if AVAILABLE:
    register()

TIMED = ("step_cost", "compressors")


@pytest.fixture
def simulated():
    if not AVAILABLE:
        pytest.skip("this torch cannot have a device written in Python")
    with simulated_device() as device:
        yield device


class FakeEvent:
    """As many milliseconds after the last one as it is told."""

    waits: list[float] = []  # noqa: RUF012
    now = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.at = None

    def record(self, stream):
        FakeEvent.now += FakeEvent.waits.pop(0)
        self.at = FakeEvent.now

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, later):
        return later.at - self.at


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    FakeEvent.now = 0.0
    return FakeEvent


def test_the_clock_of_a_gpu_adds_what_lies_between_its_events(events):
    events.waits = [5.0, 250.0, 750.0, 1e-3]
    clock = clock_of("cuda:0")
    assert isinstance(clock, CudaClock)
    assert [clock(), clock(), clock()] == pytest.approx([0.25, 1.0, 1.000001])


def test_work_on_a_gpu_is_measured_by_events_after_a_warm_up(events):
    ran = []
    variant = timing.Variant("a", lambda: ran.append(1), num_steps=2, num_warmup=3)
    events.waits = [0.0] * 4 + [60.0] + [0.0] * 3  # what is timed takes 60 ms
    rounds = timing.measure(
        [variant],
        timing.Pace(seconds=9, least=1, most=1),
        lambda _: None,
        clock_of("cuda"),
    )
    assert rounds == [{"a": pytest.approx(0.03)}]
    assert len(ran) == 3 + 1 + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMED)
def test_every_question_is_answered_on_a_device(name, simulated):
    question = load(name)
    config = dataclasses.replace(question.SCALES["smoke"], device=simulated.name)
    if name == "step_cost":  # once: no differences are taken
        config = dataclasses.replace(config, pace=timing.Pace(seconds=0, least=1))
    rows = question.compute(config, lambda what, share: None)
    assert all(row["median"] >= 0 for row in rows)
    assert len(question.table(rows).rows) >= 4
    if name == "step_cost":
        assert all(row["target"] is None for row in rows)


def test_memory_of_a_gpu_is_that_of_its_tensors(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1234)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", seen.append)
    assert memory.peak_memory("cuda:1") == 1234
    assert memory.reset_peak("cuda:1")
    assert seen == ["cuda:1"]


def test_the_gpu_is_among_the_facts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a {device}")
    assert run.machine("cuda")["gpu"] == "a cuda"
    assert "gpu" not in run.machine()


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_without_a_gpu_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench("--device", "cuda", "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "sees no CUDA devices here: nothing was measured" in result.output
    assert not (tmp_path / "new").exists()


def test_a_gpu_that_is_not_there_is_named_by_how_many_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = bench("--device", "cuda:1", "--out", tmp_path)
    assert result.exit_code == 2
    assert "sees 1 CUDA device here" in result.output


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:x", "sim:0"])
def test_another_device_is_refused_with_those_there_are(name, tmp_path):
    result = bench("--device", name, "--out", tmp_path)
    assert result.exit_code == 2
    assert f"no device {name!r}: choose" in result.output
