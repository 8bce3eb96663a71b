import pytest
import torch

from dome_lab.paper.tasks.selection import Selection, balanced

COUNTS = (5, 40, 2, 13)


@pytest.fixture
def labels(rng):
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(COUNTS))
    return labels[torch.randperm(len(labels), generator=rng)]


def class_counts(labels):
    return torch.bincount(labels, minlength=4).tolist()


@pytest.mark.parametrize(
    ("number", "counts"),
    [
        (4, [1, 1, 1, 1]),
        (7, [2, 2, 2, 1]),
        (8, [2, 2, 2, 2]),
        (17, [5, 5, 2, 5]),
        (40, [5, 20, 2, 13]),
        (60, [5, 40, 2, 13]),
    ],
)
def test_classes_have_as_equal_numbers_as_they_can(labels, number, counts):
    assert class_counts(labels[balanced(labels, number, 4)]) == counts


def test_a_smaller_choice_is_part_of_a_larger_one(labels):
    for number in range(1, 60):
        smaller = set(balanced(labels, number, 4).tolist())
        assert len(smaller) == number
        assert smaller < set(balanced(labels, number + 1, 4).tolist())


def test_the_choice_is_no_head_of_the_file_and_repeats_itself(labels):
    chosen = balanced(labels, 12, 4)
    assert torch.equal(chosen, balanced(labels, 12, 4))
    assert torch.equal(chosen, chosen.sort().values)
    heads = [(labels == c).nonzero().flatten()[:4] for c in range(4)]
    assert not torch.equal(chosen, torch.cat(heads).sort().values)


def test_everything_is_everything_in_its_order(labels):
    train, test, num_classes = Selection().choose("x", labels, labels[:9], 4)
    assert torch.equal(train, torch.arange(60))
    assert torch.equal(test, torch.arange(9))
    assert num_classes == 4


def test_only_the_first_classes_are_kept(labels):
    train, test, num_classes = Selection(num_classes=2).choose("x", labels, labels, 4)
    assert class_counts(labels[train]) == class_counts(labels[test]) == [5, 40, 0, 0]
    assert num_classes == 2


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(num_train=61), "num_train 61 is more than the 60 .* at most 60"),
        (Selection(num_test=61), "num_test 61 is more than the 60 .* at most 60"),
        (Selection(num_classes=5), "num_classes 5 is more than the 4 .* at most 4"),
        (
            Selection(num_train=46, num_classes=2),
            "num_train 46 is more than the 45 samples that the 2 classes of made have",
        ),
    ],
)
def test_more_than_there_is_is_refused_with_what_there_is(labels, selection, message):
    with pytest.raises(ValueError, match=message):
        selection.choose("made", labels, labels, 4)


@pytest.mark.parametrize(
    ("argument", "value"), [("num_train", 0), ("num_test", -3), ("num_classes", 1)]
)
def test_too_little_is_refused(argument, value):
    with pytest.raises(ValueError, match=rf"{argument} {value}: choose \d or more"):
        Selection(**{argument: value})
