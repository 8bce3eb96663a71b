"""Image data sets: scikit-learn's digits, MNIST, CIFAR-10 and Tiny ImageNet."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from dome_lab.paper.tasks.hub import Arrays, Rows, Source, cached, load_splits
from dome_lab.paper.tasks.selection import Selection, Task

FORMAT = 1  # of cached arrays; count up when decoding changes
CHANNELS = {"L": 1, "RGB": 3}  # Pillow's names


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """An image data set.

    Attributes:
        source: Where it is.
        mode: What every image is converted to, "L" (grey) or "RGB".
    """

    source: Source
    mode: str


IMAGE_SETS = {
    "mnist": ImageSet(
        source=Source(name="ylecun/mnist", inputs="image", labels="label"), mode="L"
    ),
    "cifar10": ImageSet(
        source=Source(name="uoft-cs/cifar10", inputs="img", labels="label"), mode="RGB"
    ),
    # The labels of its test images were never published.
    "tiny_imagenet": ImageSet(
        source=Source(
            name="zh-plus/tiny-imagenet", inputs="image", labels="label", test="valid"
        ),
        mode="RGB",
    ),
}


def load_images(name: str, selection: Selection, folder: Path | None) -> Task:
    """A task of ``IMAGE_SETS``, decoded or from the cache.

    Args:
        name: Which one.
        selection: How much of it.
        folder: The folder of data sets; None takes the Hub.
    """
    image_set = IMAGE_SETS[name]
    train, test = load_splits(image_set.source, folder)
    arrays = cached(
        _key(image_set, train, test), lambda: _decode_all(image_set, train, test)
    )
    train_x, train_y, test_x, test_y = (
        torch.from_numpy(arrays[part])
        for part in ("train_x", "train_y", "test_x", "test_y")
    )
    return image_task(name, train_x, train_y, test_x, test_y, selection)


def image_task(
    name: str,
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    selection: Selection,
) -> Task:
    """The selected images, normalised by the selected training images.

    Args:
        name: Of the task.
        train_x: Pixels, shape (N, channels, height, width).
        train_y: Classes, shape (N,), int64.
        test_x: Pixels, shape (M, channels, height, width).
        test_y: Classes, shape (M,), int64.
        selection: How much of it.
    """
    num_classes = int(train_y.max()) + 1
    if int(test_y.max()) >= num_classes:
        raise ValueError(
            f"{name}: test label {int(test_y.max())} is not among the {num_classes} "
            "classes of the training split: give both splits the same classes"
        )
    if selection.validation:
        test_x, test_y = train_x, train_y
    train, test, num_classes = selection.choose(name, train_y, test_y, num_classes)
    x = train_x[train].float()
    mean = _channel_means(x.mean((2, 3)))
    # The root mean square of what is left; torch.std takes six times as long.
    lengths = torch.linalg.vector_norm(x.sub_(mean), dim=(2, 3))
    scale = _channel_means(lengths.square() / x[0, 0].numel()).sqrt()
    if not bool((scale > 0).all()):
        raise ValueError(f"{name}: a channel is the same in all training images")
    return Task(
        name,
        x.div_(scale),
        train_y[train],
        test_x[test].float().sub_(mean).div_(scale),
        test_y[test],
        num_classes,
    )


def _channel_means(values: Tensor) -> Tensor:
    """Means over images of values (N, channels), shape (channels, 1, 1)."""
    # Summed in float64: millions of numbers in float32 were off by a fifth.
    return values.double().mean(0).float()[:, None, None]


def _key(image_set: ImageSet, train: Rows, test: Rows) -> str:
    content = (FORMAT, image_set.mode, train._fingerprint, test._fingerprint)
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    return f"{image_set.source.name.replace('/', '--')}-{digest}"


def _decode_all(image_set: ImageSet, train: Rows, test: Rows) -> Arrays:
    source = image_set.source
    train_where = f"{source.name}, split {source.train!r}"
    test_where = f"{source.name}, split {source.test!r}"
    train_x = _decode(train, image_set, train_where, size=None)
    size = train_x.shape[-1], train_x.shape[-2]
    return {
        "train_x": train_x,
        "train_y": _labels(train, source.labels, train_where),
        "test_x": _decode(test, image_set, test_where, size=size),
        "test_y": _labels(test, source.labels, test_where),
    }


def _decode(
    rows: Rows, image_set: ImageSet, where: str, size: tuple[int, int] | None
) -> NDArray[np.uint8]:
    """All images of a split as one array (N, channels, height, width)."""
    pixels: NDArray[np.uint8] | None = None
    for row, stored in enumerate(_stored_images(rows, image_set.source.inputs)):
        try:
            image = _open(stored).convert(image_set.mode)
        except (OSError, SyntaxError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where}: the image of row {row} cannot be read ({error}): mend or "
                "remove that row, or fetch the file again"
            ) from error
        size = image.size if size is None else size
        if image.size != size:
            raise ValueError(
                f"{where}: the image of row {row} has {image.size[0]} x "
                f"{image.size[1]} pixels, the first one {size[0]} x {size[1]}: "
                "all images must have one size"
            )
        if pixels is None:
            shape = (len(rows), CHANNELS[image_set.mode], size[1], size[0])
            pixels = np.empty(shape, dtype=np.uint8)
        pixels[row] = np.asarray(image).reshape(size[1], size[0], -1).transpose(2, 0, 1)
    if pixels is None:
        raise ValueError(f"{where}: no rows")
    return pixels


def _stored_images(rows: Rows, column: str) -> Iterator[object]:
    """The images as files: {"bytes": ..., "path": ...}."""
    import datasets

    encoded = rows.select_columns([column])
    if isinstance(rows.features[column], datasets.Image):
        encoded = encoded.cast_column(column, datasets.Image(decode=False))
    for batch in encoded.iter(batch_size=1000):
        yield from batch[column]


def _open(stored: object) -> Image.Image:
    if not isinstance(stored, dict) or "bytes" not in stored:
        raise ValueError(f"not an image but {stored!r}")
    content = stored["bytes"]
    return Image.open(stored["path"] if content is None else io.BytesIO(content))


def _labels(rows: Rows, column: str, where: str) -> NDArray[np.int64]:
    labels = list(rows[column])
    for row, label in enumerate(labels):
        if not isinstance(label, int) or label < 0:
            raise ValueError(
                f"{where}: the label of row {row} is {label!r}: labels must be "
                "numbers from 0"
            )
    return np.array(labels, dtype=np.int64)


TEST_SHARE = 0.25
ALL = Selection()


def digits(seed: int = 0, size: int = 16, selection: Selection = ALL) -> Task:
    """Digits as images (N, 1, size, size), training pixels of mean 0 and variance 1.

    Args:
        seed: Decides which quarter of the images is held out for testing.
        size: Side of the images; other than 8, they are resized bilinearly.
        selection: How much of them.
    """
    x, y = _images()
    if size != x.shape[-1]:
        x = interpolate(x, size=(size, size), mode="bilinear")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.split([num := int(TEST_SHARE * len(x)), len(x) - num])
    return image_task("digits", x[train], y[train], x[test], y[test], selection)


def _images() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8), and which digits they are.

    From the file that ``load_digits`` reads: importing scikit-learn for it takes longer
    than importing torch, in every process.
    """
    spec = find_spec("sklearn")
    folders = (spec.submodule_search_locations if spec else None) or []
    paths = [Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    if paths and paths[0].exists():
        table = np.loadtxt(paths[0], delimiter=",", dtype=np.float32)
        pixels, labels = table[:, :-1], table[:, -1]
    else:  # says that scikit-learn is missing, or knows where the file is now
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return x, torch.as_tensor(labels, dtype=torch.int64)
