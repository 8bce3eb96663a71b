import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

sys.path.insert(0, str(ROOT / "tools"))
import features  # noqa: E402
import matrix  # noqa: E402
import support_table  # noqa: E402


@pytest.fixture
def results():
    if not support_table.RESULTS.exists():
        pytest.skip("make matrix has not been run")
    return json.loads(support_table.RESULTS.read_text())


@pytest.fixture
def environments(results):
    return results["environments"]


def test_the_tables_say_what_make_matrix_found(results):
    text = support_table.PAGE.read_text()
    made = support_table.filled(text, results)
    assert made == text, "run python tools/support_table.py"
    assert "| CUDA | " in text


def test_the_oldest_torch_that_is_claimed_is_the_oldest_whose_tests_passed(
    environments,
):
    (claimed,) = (r for r in PROJECT["dependencies"] if r.startswith("torch"))
    passed = [
        support_table.version_of(found, "torch")
        for found in environments.values()
        if support_table.succeeded(found, "torch")
    ]
    oldest = min(map(support_table.parts, passed))
    assert support_table.parts(claimed) == oldest[: len(support_table.parts(claimed))]


def test_the_pythons_that_are_claimed_are_those_whose_tests_passed(environments):
    claimed = {
        c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python ::" in c
    }
    passed = {
        found["python"].rpartition(".")[0]
        for found in environments.values()
        if support_table.succeeded(found, "torch")
    }
    assert claimed == passed


@pytest.mark.parametrize("name", support_table.TRAINERS)
def test_the_oldest_trainers_that_are_claimed_are_those_whose_tests_passed(
    name, environments
):
    extras = PROJECT["optional-dependencies"].values()
    bounds = {r for extra in extras for r in extra if re.match(rf"{name}\b", r)}
    (bound,) = {r.partition(",")[0] for r in bounds}
    claimed = support_table.parts(bound)
    oldest = environments["oldest"]
    assert support_table.succeeded(oldest, name)
    version = support_table.parts(support_table.version_of(oldest, name))
    assert version[: len(claimed)] == claimed
    assert support_table.succeeded(environments["newest"], name)


def test_no_environment_of_the_table_failed(environments):
    for name, found in environments.items():
        assert all(suite["failed"] == 0 for suite in found["suites"].values()), name
    assert set(environments) <= set(matrix.ENVIRONMENTS)


@pytest.mark.parametrize("row", [r for r in features.ROWS if r.paths], ids=str)
def test_every_feature_has_tests_and_a_result(row, environments):
    assert features.files_of([row], ROOT)
    assert row.name in environments["development"]["features"]


OUTCOMES = {
    "tests/samples/tracing/test_refusals.py::test_x_is_refused[fsdp2]": "passed",
    "tests/samples/tracing/test_refusals.py::test_x_is_refused[fsdp-x]": "passed",
    "tests/distributed/test_split.py::test_fully_shard[2]": "failed",
    "tests/distributed/test_split.py::test_fully_shard[3]": "skipped",
    "tests/lab/test_fully_shard.py::test_it": "passed",
}


def test_tests_are_counted_for_their_feature_and_refusals_apart():
    (row,) = (r for r in features.ROWS if r.name.startswith("FSDP2"))
    assert features.counted(row, OUTCOMES) == {
        "works": {"passed": 0, "failed": 1, "skipped": 1},
        "refused": {"passed": 1, "failed": 0, "skipped": 0},
    }


def test_tests_on_a_gpu_count_for_rows_that_need_one_and_for_no_other():
    rows = {row.name: row for row in features.ROWS}
    outcomes = {
        "tests/device/test_cuda.py::test_x": "skipped",
        "tests/device/test_filter.py::test_y[cuda-svd]": "skipped",
        "tests/device/test_filter.py::test_y[simulated-svd]": "passed",
    }
    simulated = features.counted(rows["CUDA, simulated on the CPU"], outcomes)
    assert simulated["works"] == {"passed": 1, "failed": 0, "skipped": 0}
    real = features.counted(rows["CUDA"], outcomes)
    assert real["works"] == {"passed": 0, "failed": 0, "skipped": 2}


def test_a_run_of_all_tests_is_divided_into_suites(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.trackers.test_svd" name="a"/>'
        '<testcase classname="tests.lab.test_x" name="b"><failure/></testcase>'
        '<testcase classname="tests.integrations.test_y" name="c[1.5]"><skipped/>'
        "</testcase></testsuite></testsuites>"
    )
    found = matrix.of_report(report, ("quick", "integrations"))
    assert found["quick"] == {"tests/trackers/test_svd.py::a": "passed"}
    assert found["integrations"] == {"tests/integrations/test_y.py::c[1.5]": "skipped"}
    assert features.summed(found["features"]) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
    }


def test_a_run_without_a_report_is_a_failure(tmp_path):
    outcomes = features.outcomes_in(tmp_path / "missing.xml")
    assert features.summed(outcomes)["failed"] == 1
    assert features.counted(features.ROWS[0], outcomes)["works"]["failed"] == 1


def counts(passed=0, failed=0, skipped=0):
    return {"passed": passed, "failed": failed, "skipped": skipped}


@pytest.mark.parametrize(
    ("works", "refused", "state"),
    [
        (counts(3), counts(), "tested (3)"),
        (counts(3), counts(2), "tested (3), refused by name elsewhere (2)"),
        (counts(0, 0, 4), counts(2), "refused by name (2)"),
        (counts(0, 0, 4), counts(), "never run (tests are there: 4)"),
        (counts(), counts(), "never run"),
        (counts(3, 1), counts(2, 1), "**2 tests failed**"),
    ],
)
def test_a_state_is_what_became_of_the_tests(works, refused, state):
    assert support_table.state_of(works, refused) == state


def test_a_failure_is_shown():
    assert "**2 failed**" in support_table.told(counts(3, 2))
    assert support_table.told(None) == "not run"


def test_the_matrix_runs_what_make_quick_runs():
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^quick:.*?\n\n", makefile, re.MULTILINE | re.DOTALL)
    assert re.findall(r"tests/\S+", recipe) == list(matrix.QUICK)
