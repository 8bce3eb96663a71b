from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image

import dome_lab.paper.tasks
from dome_lab.paper.tasks.images import IMAGE_SETS
from dome_lab.paper.tasks.texts import DBPEDIA


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub_cache")
    monkeypatch.setenv("DOME_CACHE", str(tmp_path / "dome_cache"))
    monkeypatch.delenv("DOME_DATA", raising=False)
    dome_lab.paper.tasks._load.cache_clear()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def random_image(seed, mode="RGB", size=(6, 4)):
    rng = torch.Generator().manual_seed(seed)
    channels = len(mode)  # "L" or "RGB"
    shape = (size[1], size[0], channels)
    pixels = torch.randint(256, shape, generator=rng, dtype=torch.uint8).numpy()
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels)


@pytest.fixture
def write_split(folder):
    def write(source, split, columns, features=None):
        path = Path(folder, source.name, "data", f"{split}-00000-of-00001.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(columns, features=features).to_parquet(path)
        return path

    return write


@pytest.fixture
def write_images(write_split):
    def write(name, train, test, train_y=None, test_y=None):
        source = IMAGE_SETS[name].source
        features = datasets.Features(
            {source.inputs: datasets.Image(), source.labels: datasets.Value("int64")}
        )
        parts = (
            (source.train, train, train_y or [i % 3 for i in range(len(train))]),
            (source.test, test, test_y or [i % 3 for i in range(len(test))]),
        )
        for split, images, labels in parts:
            columns = {source.inputs: images, source.labels: labels}
            path = write_split(source, split, columns, features)
        return path.parent

    return write


@pytest.fixture
def write_texts(write_split):
    def write(train, test):
        for split, rows in ((DBPEDIA.train, train), (DBPEDIA.test, test)):
            columns = {"text": [t for t, _ in rows], "l2": [label for _, label in rows]}
            write_split(DBPEDIA, split, columns)

    return write


@pytest.fixture
def colour_images():
    return [random_image(seed) for seed in range(9)]


@pytest.fixture
def grey_image():
    return random_image(100, mode="L")
