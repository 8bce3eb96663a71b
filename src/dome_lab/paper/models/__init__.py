"""The networks of the experiments, one a file, and the table of their names."""

from collections.abc import Callable

from torch import nn

from dome_lab.paper.models.mlp import mlp
from dome_lab.paper.models.relu_mlp import relu_mlp
from dome_lab.paper.models.resnet8 import resnet8
from dome_lab.paper.models.resnet18 import resnet18
from dome_lab.paper.models.tanh_cnn import tanh_cnn
from dome_lab.paper.models.transformer import Transformer
from dome_lab.paper.tasks.task import Task

__all__ = ["MODELS"]

MakeModel = Callable[[Task], nn.Module]


def _for_images(name: str, network: Callable[[int, int], nn.Module]) -> MakeModel:
    def make(task: Task) -> nn.Module:
        _check_images(name, task)
        return network(task.train_x.shape[1], task.num_classes)

    return make


def _check_images(name: str, task: Task) -> None:
    if task.vocabulary_size is not None:
        raise ValueError(
            f"model {name!r} takes images, task {task.name!r} has texts: choose "
            "model 'transformer'"
        )


def _tanh_cnn(task: Task) -> nn.Module:
    _check_images("tanh_cnn", task)
    _, channels, _, side = task.train_x.shape
    return tanh_cnn(channels, task.num_classes, side)


def _for_flat_images(name: str, network: Callable[[int, int], nn.Module]) -> MakeModel:
    def make(task: Task) -> nn.Module:
        _check_images(name, task)
        return network(task.train_x[0].numel(), task.num_classes)

    return make


def _transformer(task: Task) -> nn.Module:
    if task.vocabulary_size is None:
        raise ValueError(
            f"model 'transformer' takes texts, task {task.name!r} has images: choose "
            "model 'resnet8' or 'resnet18'"
        )
    length = task.train_x.shape[1]
    return Transformer(task.vocabulary_size, task.num_classes, length)


MODELS: dict[str, MakeModel] = {
    "resnet8": _for_images("resnet8", resnet8),
    "resnet18": _for_images("resnet18", resnet18),
    "transformer": _transformer,
    "tanh_cnn": _tanh_cnn,
    "mlp": _for_flat_images("mlp", mlp),
    "relu_mlp": _for_flat_images("relu_mlp", relu_mlp),
}
