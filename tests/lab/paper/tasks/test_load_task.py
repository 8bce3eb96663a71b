import pytest
import torch

from dome_lab.paper.tasks import TASKS, load_task


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=f"no task 'minst': .*{', '.join(TASKS)}"):
        load_task("minst")


def test_the_table_has_the_papers_tasks():
    paper = {"mnist", "cifar10", "tiny_imagenet", "dbpedia"}
    assert TASKS.keys() == paper | {
        "digits",
        "made_text",
        "dbpedia_words",
        "made_words",
    }


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


@pytest.mark.parametrize("name", ["digits", "made_text"])
def test_validation_samples_are_balanced_training_samples_that_are_not_trained_on(name):
    task = load_task(name, num_train=40, num_test=20, validation=True)
    assert torch.bincount(task.test_y).unique().numel() == 1
    assert len(task.test_y) == 20
    both = load_task(name, num_train=60)
    assert torch.equal(
        torch.cat([task.train_y, task.test_y]).bincount(), both.train_y.bincount()
    )
    known = {tuple(x.flatten().tolist()) for x in task.train_x}
    held_out = {tuple(x.flatten().tolist()) for x in task.test_x}
    assert not known & held_out


def test_the_training_samples_of_validation_are_those_of_the_test():
    judged = load_task("digits", num_train=40, num_test=20)
    tried = load_task("digits", num_train=40, num_test=20, validation=True)
    torch.testing.assert_close(judged.train_x, tried.train_x)


@pytest.mark.parametrize("num_train", [None, 1340])
def test_too_few_samples_left_for_validation_are_refused(num_train):
    with pytest.raises(ValueError, match="choose a smaller num_train or num_test"):
        load_task("digits", num_train=num_train, num_test=20, validation=True)
