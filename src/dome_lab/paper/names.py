"""What tasks, models and methods are called where people read them."""

from dome_lab.paper.run import Value

NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "tiny_imagenet": "Tiny ImageNet",
    "dbpedia": "DBPedia-Classes L2",
    "made_text": "made-up text",
    "relu_mlp": "MLP",
    "resnet8": "ResNet-8",
    "resnet18": "ResNet-18",
    "transformer": "3-layer Transformer",
    "gaussian": "Gaussian sketch",
    "hadamard": "Hadamard sketch",
    "randomk": "random-k",
    "randomk+feedback": "random-k, feedback",
    "topk+feedback": "top-k, feedback",
    "signsgd+feedback": "signs, feedback",
    "terngrad": "TernGrad",
    "qsgd": "QSGD",
    "powersgd+feedback": "PowerSGD, feedback",
    "tanh_cnn": "small tanh CNN",
    "mlp": "MLP",
    "sgd": "SGD",
    "ema": "averaging momentum",
    "adam": "Adam",
}


def name_of(value: Value) -> str:
    """A value as it is read: "MNIST" for "mnist", "all" for None, 1,000 for 1000."""
    if value is None:
        return "all"
    if isinstance(value, str):
        return NAMES.get(value, value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def subset_name(task: Value, num_classes: Value) -> str:
    """A task's name, with its number of classes if it is not that of all."""
    return name_of(task) + ("" if num_classes is None else f", {num_classes} classes")
