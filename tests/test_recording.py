import csv
import json
import math
import re
import types
from pathlib import Path

import pytest
import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.diagnostics import FilterStats

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "logging.md"
KNOWN = FilterStats(
    step=3,
    fraction=0.5,
    kept_norm=0.6,
    removed_share=0.64,
    signal=0.5,
    noise=2.0,
    signal_to_noise=math.nan,
    signal_to_noise_after=-0.25,
    noise_scale_inside=40.0,
    noise_scale_outside=300.0,
    bytes_factor=8.0,
    effective_rank=4.0,
    drift=1e-9,
    skipped_updates=0,
    orthogonality_error=0.0,
    seconds=0.01,
)
FAKE = types.SimpleNamespace(stats=KNOWN)
NUMBERS = {name: getattr(KNOWN, name) for name in KNOWN.__slots__} | {"elapsed": 0.0}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    stopped = types.SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("dome.recording.time", stopped)


def trained(path, rng, num=5, **options):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=3)
    seen = []
    recorder = path if isinstance(path, dome.Recorder) else None
    with recorder or dome.Recorder(path, **options) as recorder:
        for x, y in batches(rng, num):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            recorder.record(grad_filter, loss=loss)
            seen.append((grad_filter.stats, loss.item()))
    return seen


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_every_number_of_every_step_exactly(tmp_path, rng):
    seen = trained(tmp_path / "run.csv", rng)
    rows = read_csv(tmp_path / "run.csv")
    assert len(rows) == len(seen) == 5
    for row, (stats, loss) in zip(rows, seen, strict=True):
        assert set(row) == {*KNOWN.__slots__, "elapsed", "loss"}
        for name in KNOWN.__slots__:
            value = getattr(stats, name)
            assert row[name] == ("" if not math.isfinite(value) else repr(value))
        assert float(row["loss"]) == loss


def test_jsonl_has_every_number_of_every_step_exactly(tmp_path, rng):
    seen = trained(tmp_path / "run.jsonl", rng)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    expected = [
        {
            name: value if math.isfinite(value := getattr(stats, name)) else None
            for name in KNOWN.__slots__
        }
        | {"elapsed": 0.0, "loss": loss}
        for stats, loss in seen
    ]
    assert rows == expected


def test_only_every_nth_step_is_written_and_asked_for(tmp_path):
    asked = []

    class Counted:
        @property
        def stats(self):
            asked.append(1)
            return KNOWN

    with dome.Recorder(tmp_path / "run.jsonl", every=3) as recorder:
        for _ in range(7):
            recorder.record(Counted())
    assert len(asked) == 3
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3


def test_what_is_not_a_number_is_empty_or_null(tmp_path):
    for name in ("run.csv", "run.jsonl"):
        with dome.Recorder(tmp_path / name) as recorder:
            recorder.record(FAKE, loss=math.inf)
    (row,) = read_csv(tmp_path / "run.csv")
    assert row["signal_to_noise"] == row["loss"] == ""
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(line) == NUMBERS | {"signal_to_noise": None, "loss": None}


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_a_second_recorder_goes_on_in_the_same_file(tmp_path, name):
    for _ in range(2):
        with dome.Recorder(tmp_path / name) as recorder:
            recorder.record(FAKE)
    lines = (tmp_path / name).read_text().splitlines()
    assert len(lines) == (3 if name.endswith("csv") else 2)
    assert lines[-1] == lines[-2]


def test_records_are_on_disk_before_the_recorder_is_closed(tmp_path):
    recorder = dome.Recorder(tmp_path / "run.csv")
    recorder.record(FAKE)
    assert len(read_csv(tmp_path / "run.csv")) == 1
    recorder.close()
    recorder.close()


def test_other_columns_than_those_of_the_file_are_refused(tmp_path):
    with dome.Recorder(tmp_path / "run.csv") as recorder:
        recorder.record(FAKE, loss=1.0)
        with pytest.raises(ValueError, match=r"\['loss'\] differ"):
            recorder.record(FAKE)
    assert len(read_csv(tmp_path / "run.csv")) == 1


def test_numbers_in_a_dictionary_get_a_column_each(tmp_path):
    from dataclasses import dataclass

    @dataclass
    class Stats:
        step: int
        sent: dict

    fake = types.SimpleNamespace(stats=Stats(1, {"sums": 5, "basis": 0}))
    with dome.Recorder(tmp_path / "run.jsonl") as recorder:
        recorder.record(fake)
    row = json.loads((tmp_path / "run.jsonl").read_text())
    assert row == {"step": 1, "sent.sums": 5, "sent.basis": 0, "elapsed": 0.0}


def test_a_function_gets_the_numbers_of_every_record(rng):
    records = []
    seen = trained(records.append, rng, num=4, every=2)
    assert [(r["step"], r["loss"]) for r in records] == [
        (stats.step, loss) for stats, loss in seen[::2]
    ]
    assert all(math.isfinite(value) for r in records for value in r.values())


def test_a_function_does_not_get_what_is_not_a_number():
    records = []
    dome.Recorder(records.append).record(FAKE, loss=math.inf)
    finite = {k: v for k, v in NUMBERS.items() if k != "signal_to_noise"}
    assert records == [finite]


def test_the_recipe_for_tensorboard_makes_a_scalar_a_number(tmp_path, rng, monkeypatch):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (recipe,) = (block for block in blocks if "SummaryWriter" in block)
    monkeypatch.chdir(tmp_path)
    names = {"dome": dome}
    exec(recipe, names)
    seen = trained(names["recorder"], rng, num=3)
    names["writer"].close()
    events = accumulator.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("dome/loss")]
    # TensorBoard stores float32.
    assert found == [(s.step, pytest.approx(loss, rel=1e-6)) for s, loss in seen]


def test_wrong_paths_and_values_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.csv or \.jsonl, or a function"):
        dome.Recorder(tmp_path / "run.txt")
    with pytest.raises(ValueError, match=r"there is no folder .*missing"):
        dome.Recorder(tmp_path / "missing" / "run.csv")
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        dome.Recorder(tmp_path / "run.csv", every=0)
    with dome.Recorder(tmp_path / "run.csv") as recorder:
        with pytest.raises(ValueError, match=r"loss has shape \(2,\)"):
            recorder.record(FAKE, loss=torch.ones(2))
        with pytest.raises(ValueError, match=r"\['drift'\] are recorded anyway"):
            recorder.record(FAKE, drift=1.0)
    assert (tmp_path / "run.csv").read_text() == ""


def test_a_loop_without_a_filter_is_recorded_as_the_baseline(tmp_path):
    with dome.Recorder(tmp_path / "plain.jsonl", every=2) as recorder:
        for loss in (3.0, 2.0, 1.0):
            recorder.record(None, loss=loss)
    lines = (tmp_path / "plain.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": step, "filtered": False, "elapsed": 0.0, "loss": loss}
        for step, loss in ((1, 3.0), (3, 1.0))
    ]


@pytest.mark.parametrize("content", ['{"lr": 0.1}\n', "my notes\n", "[1]", "step\n"])
def test_a_file_without_rows_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "conf.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"conf\.jsonl has no rows of a Recorder"):
        dome.Recorder(path)
    assert path.read_text() == content


def test_half_a_row_at_the_end_is_a_line_of_its_own(tmp_path):
    path = tmp_path / "run.jsonl"
    with dome.Recorder(path) as recorder:
        recorder.record(FAKE)
    whole = path.read_text()
    path.write_text(whole + '{"step": 4, "fra')
    with dome.Recorder(path) as recorder:
        recorder.record(FAKE)
    assert path.read_text() == whole + '{"step": 4, "fra\n' + whole


def test_a_table_of_others_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "conf.csv"
    path.write_text("lr,seed\n0.1,3\n")
    with dome.Recorder(path) as recorder, pytest.raises(ValueError, match="differ"):
        recorder.record(FAKE)
    assert path.read_text() == "lr,seed\n0.1,3\n"
