import pytest
import torch

from dome_lab.paper.models import make_model
from dome_lab.paper.tasks import load_task
from dome_lab.paper.tasks.texts import CLS, DBPEDIA, MADE_TOPICS, PADDING, UNKNOWN

TRAIN = [
    ("the river bank", "River"),
    ("a bank of the river", "River"),
    ("the goal", "Athlete"),
    (None, "Athlete"),
    ("", "Database"),
]
TEST = [("the bank clerk", "Database"), ("", "River"), (None, "Athlete")]


def test_words_are_numbered_by_the_training_texts(write_texts, folder):
    write_texts(TRAIN, TEST)
    task = load_task("dbpedia", data_dir=folder)
    # Seen twice or more: the (3 times), then bank and river.
    the, bank, river = 3, 4, 5
    assert task.vocabulary_size == 6
    assert task.train_x[0, :5].tolist() == [CLS, the, river, bank, PADDING]
    assert task.test_x[0, :5].tolist() == [CLS, the, bank, UNKNOWN, PADDING]
    assert task.train_x.shape == (5, 64)


def test_classes_are_numbered_by_name(write_texts, folder):
    write_texts(TRAIN, TEST)
    task = load_task("dbpedia", data_dir=folder)
    assert task.train_y.tolist() == [2, 2, 0, 0, 1]
    assert task.test_y.tolist() == [1, 2, 0]
    assert task.num_classes == 3


def test_absent_texts_are_cls_alone(write_texts, folder):
    write_texts(TRAIN, TEST)
    task = load_task("dbpedia", data_dir=folder)
    for text in (*task.train_x[3:], *task.test_x[1:]):
        assert text[0] == CLS
        assert (text[1:] == PADDING).all()


def test_a_subset_has_a_vocabulary_of_its_own(write_texts, folder):
    write_texts(TRAIN, TEST)
    task = load_task("dbpedia", num_classes=2, data_dir=folder)
    assert task.train_y.tolist() == [0, 0, 1]
    assert task.vocabulary_size == 3  # no word comes twice


def test_a_class_that_training_lacks_is_named(write_texts, folder):
    write_texts(TRAIN, [("x", "Volcano")])
    with pytest.raises(ValueError, match="'test': class 'Volcano' is not in the train"):
        load_task("dbpedia", data_dir=folder)


@pytest.mark.parametrize("label", [None, ""])
def test_a_text_without_a_class_is_named_by_its_row(write_texts, folder, label):
    write_texts([*TRAIN, ("x", label)], TEST)
    with pytest.raises(ValueError, match=r"'train': 'l2' of row 5 is .* needs a class"):
        load_task("dbpedia", data_dir=folder)


def test_numbers_are_no_texts(write_texts, folder):
    write_texts([(1, "River")], [(2, "River")])
    with pytest.raises(ValueError, match="'text' of row 0 is 1, not a text"):
        load_task("dbpedia", data_dir=folder)


def test_a_missing_level_is_named(write_split, folder):
    for split in ("train", "test"):
        write_split(DBPEDIA, split, {"text": ["x"], "l1": ["Agent"]})
    with pytest.raises(ValueError, match="no column 'l2', only 'text', 'l1'"):
        load_task("dbpedia", data_dir=folder)


def test_texts_may_come_as_csv(folder):
    path = folder / DBPEDIA.name
    path.mkdir(parents=True)
    for split in ("train", "test"):
        rows = 'text,l1,l2,l3\n"the bank, the river",Place,River,\n,Agent,Athlete,\n'
        (path / f"DBPEDIA_{split}.csv").write_text(rows)
    task = load_task("dbpedia", data_dir=folder)
    assert task.train_y.tolist() == [1, 0]
    assert task.train_x[:, :4].tolist() == [[CLS, 3, UNKNOWN, 3], [CLS, 0, 0, 0]]


def test_the_made_texts_are_always_the_same_and_balanced():
    task = load_task("made_text")
    assert (len(task.train_x), len(task.test_x)) == (160, 40)
    assert torch.bincount(task.train_y).tolist() == [40] * len(MADE_TOPICS)
    assert task.vocabulary_size == int(task.train_x.max()) + 1
    assert int(task.train_x.sum()) == int(load_task("made_text").train_x.sum())


def test_the_made_texts_can_be_told_apart():
    task = load_task("made_text")
    counts = torch.zeros(4, task.vocabulary_size)
    for text, label in zip(task.train_x, task.train_y, strict=True):
        counts[label] += torch.bincount(text, minlength=task.vocabulary_size)
    scores = (counts + 1).log() - (counts + 1).sum(1, keepdim=True).log()
    guesses = torch.stack([scores[:, text].sum(1).argmax() for text in task.test_x])
    assert (guesses == task.test_y).float().mean() > 0.9


def test_next_words_are_the_words_one_place_further_on():
    texts, task = load_task("made_text"), load_task("made_words")
    words = texts.train_x[texts.train_x != PADDING]
    num = len(task.train_x)
    assert task.train_x.shape == task.train_y.shape == (num, 32)
    torch.testing.assert_close(task.train_x.flatten(), words[: 32 * num])
    torch.testing.assert_close(task.train_y.flatten(), words[1 : 32 * num + 1])
    assert 32 * (num + 1) >= len(words)
    assert task.num_classes == texts.vocabulary_size


def test_a_place_of_the_small_gpt_sees_no_later_words():
    task = load_task("made_words")
    torch.manual_seed(0)
    model = make_model("gpt", task)
    x = task.train_x[:3]
    changed = x.clone()
    changed[:, 20:] = UNKNOWN
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert before.shape == (3, task.num_classes, 32)
    torch.testing.assert_close(before[:, :, :20], after[:, :, :20])
    assert not torch.equal(before[:, :, 20:], after[:, :, 20:])


def test_the_two_kinds_of_text_models_are_not_mixed_up():
    with pytest.raises(ValueError, match="'transformer' takes texts with other targe"):
        make_model("transformer", load_task("made_words"))
    with pytest.raises(ValueError, match="'gpt' takes texts with other targets"):
        make_model("gpt", load_task("made_text"))
    with pytest.raises(ValueError, match="'gpt' takes texts, task 'digits' has images"):
        make_model("gpt", load_task("digits"))
