import io
import os
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dome_lab.paper.tasks import load_task
from dome_lab.paper.tasks.images import IMAGE_SETS
from dome_lab.paper.tasks.texts import DBPEDIA

DATA = os.environ.get("DOME_DATA")

pytestmark = [
    pytest.mark.skipif(not DATA, reason="needs real data in DOME_DATA"),
    pytest.mark.slow,
]

# Side, channels, classes.
SHAPES = {"mnist": (28, 1, 10), "cifar10": (32, 3, 10), "tiny_imagenet": (64, 3, 200)}


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("decoded")


@pytest.fixture(autouse=True)
def _decoded_once(_own_caches, shared_folder, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", shared_folder / "hub")
    monkeypatch.setenv("DOME_CACHE", str(shared_folder))


def stored_rows(source, split):
    folder = Path(DATA, source.name)
    (path,) = folder.glob(f"*/{split}-*.parquet")
    return pyarrow.parquet.read_table(path, columns=[source.inputs, source.labels])


@pytest.mark.parametrize("name", SHAPES)
def test_images_are_those_that_pillow_decodes(name):
    side, channels, num_classes = SHAPES[name]
    source, mode = IMAGE_SETS[name].source, IMAGE_SETS[name].mode
    task = load_task(name, data_dir=Path(DATA))
    rows = stored_rows(source, source.train)
    labels = torch.tensor(rows[source.labels].to_pylist())
    assert task.train_x.shape == (len(rows), channels, side, side)
    assert task.num_classes == num_classes
    assert torch.equal(task.train_y, labels)
    assert torch.bincount(task.test_y, minlength=num_classes).min() > 0
    pixels, was_grey = [], 0
    for place in range(0, len(rows), len(rows) // 200):
        content = rows[source.inputs][place]["bytes"].as_py()
        image = Image.open(io.BytesIO(content))
        was_grey += image.mode == "L"
        pixels.append(np.asarray(image.convert(mode)).reshape(side, side, channels))
    expected = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).double()
    ours = task.train_x[:: len(rows) // 200].double()
    assert was_grey > 0 or name == "cifar10"
    # Back from normalised pixels, channel by channel: the line through two of them.
    for channel in range(channels):
        x, y = ours[:, channel], expected[:, channel]
        low, high = y.argmin(), y.argmax()
        slope = (y.flatten()[high] - y.flatten()[low]) / (
            x.flatten()[high] - x.flatten()[low]
        )
        back = y.flatten()[low] + slope * (x - x.flatten()[low])
        assert torch.equal(back.round(), y)
        assert (back - y).abs().max() < 1e-3
    means = task.train_x.mean((0, 2, 3))
    torch.testing.assert_close(means, torch.zeros(channels), atol=1e-4, rtol=0)


def test_subsets_of_tiny_imagenet_have_every_class():
    task = load_task("tiny_imagenet", num_train=1000, num_test=400, data_dir=Path(DATA))
    assert torch.bincount(task.train_y).tolist() == [5] * 200
    assert torch.bincount(task.test_y).tolist() == [2] * 200


def test_dbpedia_has_seventy_classes():
    task = load_task("dbpedia", data_dir=Path(DATA))
    rows = pyarrow.csv.read_csv(
        Path(DATA, DBPEDIA.name, "DBPEDIA_train.csv"),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
    )
    assert len(task.train_x) == len(rows)
    assert task.num_classes == 70
    counts = {c["values"]: c["counts"] for c in rows["l2"].value_counts().to_pylist()}
    expected = [counts[name] for name in sorted(counts)]
    assert torch.bincount(task.train_y).tolist() == expected
    assert torch.bincount(task.test_y, minlength=70).min() > 0


def test_dbpedias_vocabulary_covers_most_of_the_test_texts():
    task = load_task("dbpedia", data_dir=Path(DATA))
    assert task.vocabulary_size == 8000
    assert int(task.train_x.max()) == 7999
    words = task.test_x[task.test_x != 0]
    assert (words == 1).double().mean() < 0.15
