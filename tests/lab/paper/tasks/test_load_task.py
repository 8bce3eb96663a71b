import pytest
import torch

from dome_lab.paper.tasks import TASKS, load_task


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=f"no task 'minst': .*{', '.join(TASKS)}"):
        load_task("minst")


def test_the_table_has_the_papers_tasks():
    paper = {"mnist", "cifar10", "tiny_imagenet", "dbpedia"}
    assert TASKS.keys() == paper | {"digits", "made_text"}


def test_digits_and_made_texts_need_no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("DOME_DATA", str(tmp_path / "nowhere"))
    assert load_task("digits").train_x.shape == (1348, 1, 16, 16)
    assert load_task("made_text").train_x.shape == (160, 64)


def test_a_task_is_loaded_once_a_process():
    assert load_task("digits", num_train=50) is load_task("digits", num_train=50)


@pytest.mark.parametrize("name", ["digits", "made_text"])
def test_subsets_are_balanced(name):
    task = load_task(name, num_train=42, num_test=12, num_classes=4)
    assert torch.bincount(task.train_y).tolist() == [11, 11, 10, 10]
    assert torch.bincount(task.test_y).tolist() == [3, 3, 3, 3]
    assert task.num_classes == 4


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    load_task("digits", num_train=100)
    load_task("made_text", num_train=100)
    assert torch.equal(before, torch.random.get_rng_state())
