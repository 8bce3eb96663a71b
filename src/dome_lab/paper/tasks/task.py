"""What a task is: samples and labels, decoded once, ready to train on."""

from dataclasses import dataclass

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
