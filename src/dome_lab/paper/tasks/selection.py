"""What a task is, and balanced parts of it that are the same for every caller."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """A classification task held in memory.

    Attributes:
        name: Short name, as printed and stored with results.
        train_x: Training inputs: images (N, channels, height, width), float32, or
            texts (N, length) as word numbers, int64.
        train_y: Their classes, shape (N,), int64.
        test_x: Test inputs, shape (M, ...).
        test_y: Their classes, shape (M,), int64.
        num_classes: Number of classes.
        vocabulary_size: How many word numbers there are; None if inputs are images.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    vocabulary_size: int | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """How much of a data set to use; None is all of it.

    Attributes:
        num_train: Training samples.
        num_test: Test samples.
        num_classes: Classes; the first ones by number.
        validation: Test on training samples that are not trained on, instead of test
            samples.
    """

    num_train: int | None = None
    num_test: int | None = None
    num_classes: int | None = None
    validation: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_train", 1), ("num_test", 1), ("num_classes", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} {value}: choose {least} or more")

    def choose(
        self, name: str, train_y: Tensor, test_y: Tensor, num_classes: int
    ) -> tuple[Tensor, Tensor, int]:
        """Which samples of a data set to keep, and how many classes they have.

        Args:
            name: Of the data set, for messages.
            train_y: Classes of all training samples, shape (N,).
            test_y: Classes of all test samples, shape (M,); with ``validation``,
                ``train_y`` once more.
            num_classes: How many classes there are.

        Returns:
            Positions of the training samples, of the test samples, and the number of
            classes.
        """
        if self.num_classes is not None:
            if self.num_classes > num_classes:
                raise ValueError(
                    f"num_classes {self.num_classes} is more than the {num_classes} "
                    f"classes of {name}: choose at most {num_classes}"
                )
            num_classes = self.num_classes
        train = _at_most(train_y, self.num_train, num_classes, "num_train", name)
        if self.validation:
            return train, self._held_out(name, train_y, train, num_classes), num_classes
        test = _at_most(test_y, self.num_test, num_classes, "num_test", name)
        return train, test, num_classes

    def _held_out(
        self, name: str, labels: Tensor, train: Tensor, num_classes: int
    ) -> Tensor:
        """Positions of samples beside those trained on, as many as for testing."""
        available = int((labels < num_classes).sum()) - len(train)
        number = available if self.num_test is None else self.num_test
        if not 0 < number <= available:
            raise ValueError(
                f"{name} has {available} training samples beside the {len(train)} that "
                f"are trained on, and {number or 'some'} are wanted for validation: "
                "choose a smaller num_train or num_test"
            )
        # A smaller choice is part of a larger, so the rest of the larger is new.
        both = balanced(labels, len(train) + number, num_classes)
        return both[~torch.isin(both, train)]


def _at_most(
    labels: Tensor, number: int | None, num_classes: int, argument: str, name: str
) -> Tensor:
    available = int((labels < num_classes).sum())
    if number is not None and number > available:
        raise ValueError(
            f"{argument} {number} is more than the {available} samples that the "
            f"{num_classes} classes of {name} have: choose at most {available}"
        )
    return balanced(labels, available if number is None else number, num_classes)


def balanced(labels: Tensor, num_samples: int, num_classes: int) -> Tensor:
    """Positions of samples of the first classes, as equally many of each as there are.

    Which ones depends on the labels alone, and a smaller choice is part of a larger.

    Args:
        labels: Classes of all samples, shape (N,).
        num_samples: How many to choose.
        num_classes: Classes from here on are left out.

    Returns:
        Positions in ascending order, shape (num_samples,).
    """
    turns, places = [], []
    for label in range(num_classes):
        members = (labels == label).nonzero().flatten()
        order = torch.Generator().manual_seed(label)
        places.append(members[torch.randperm(len(members), generator=order)])
        turns.append(torch.arange(len(members)))
    # Classes take turns, one sample each, and drop out when they have no more.
    taking_turns = torch.cat(turns).argsort(stable=True)
    return torch.cat(places)[taking_turns[:num_samples]].sort().values


def some_samples(task: Task, num_samples: int) -> tuple[Tensor, Tensor]:
    """So many training samples to measure something on, or all if there are fewer.

    Samples may be in the order of their classes, and every seed takes the same ones.
    """
    order = torch.randperm(
        len(task.train_x), generator=torch.Generator().manual_seed(0)
    )
    chosen = order[:num_samples]
    return task.train_x[chosen], task.train_y[chosen]
