import pytest
from checks import CHECKS

pytestmark = pytest.mark.slow


def assert_passed(results, name, num_workers):
    answers = results.get(name, {})
    told = "\n".join(map(str, results["output"].values()))
    assert set(answers) == set(range(num_workers)), f"{answers}\n{told}"
    for rank, answer in answers.items():
        assert answer == "passed", f"rank {rank}: {answer}"


@pytest.mark.parametrize("name", CHECKS)
def test_three_workers(name, three_workers):
    assert_passed(three_workers, name, 3)


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name, two_workers):
    assert_passed(two_workers, name, 2)
