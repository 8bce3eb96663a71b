import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from dome_lab.paper.tasks import load_task
from dome_lab.paper.tasks.images import IMAGE_SETS, image_task
from dome_lab.paper.tasks.selection import Selection


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def pixels(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).double()


def literal_normalisation(images, training_images):
    train = torch.stack([pixels(image) for image in training_images])
    x = torch.stack([pixels(image) for image in images])
    for channel in range(3):
        values = train[:, channel]
        x[:, channel] = (x[:, channel] - values.mean()) / values.std(correction=0)
    return x.float()


def count_decoding(monkeypatch):
    calls = []
    original = Image.open

    def counting(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr("PIL.Image.open", counting)
    return calls


def test_images_are_normalised_by_the_training_images(
    write_images, folder, colour_images
):
    train, test = colour_images[:6], colour_images[6:]
    write_images("cifar10", train, test)
    task = load_task("cifar10", data_dir=folder)
    # float32 against float64.
    close = {"atol": 1e-5, "rtol": 1e-5}
    expected = literal_normalisation(train, train)
    torch.testing.assert_close(task.train_x, expected, **close)
    expected = literal_normalisation(test, train)
    torch.testing.assert_close(task.test_x, expected, **close)
    assert task.train_y.tolist() == [0, 1, 2, 0, 1, 2]
    assert task.train_y.dtype == task.test_y.dtype == torch.int64
    assert (task.name, task.num_classes) == ("cifar10", 3)


def test_a_grey_image_among_colour_images_becomes_three_equal_channels(
    write_images, folder, colour_images, grey_image
):
    train = [*colour_images[:5], grey_image]
    write_images("tiny_imagenet", train, colour_images[6:])
    task = load_task("tiny_imagenet", data_dir=folder)
    in_colour = [image.convert("RGB") for image in train]
    expected = literal_normalisation(in_colour, in_colour)
    torch.testing.assert_close(task.train_x, expected, atol=1e-5, rtol=1e-5)


def test_grey_images_have_one_channel(write_images, folder, colour_images):
    grey = [image.convert("L") for image in colour_images]
    write_images("mnist", grey[:6], grey[6:])
    assert load_task("mnist", data_dir=folder).train_x.shape == (6, 1, 4, 6)


def test_the_second_load_decodes_nothing(
    write_images, folder, colour_images, monkeypatch
):
    import dome_lab.paper.tasks

    write_images("cifar10", colour_images[:6], colour_images[6:])
    first = load_task("cifar10", data_dir=folder)
    assert load_task("cifar10", data_dir=folder) is first
    dome_lab.paper.tasks._load.cache_clear()
    decoded = count_decoding(monkeypatch)
    again = load_task("cifar10", data_dir=folder)
    assert decoded == []
    assert again is not first
    assert torch.equal(again.train_x, first.train_x)
    assert torch.equal(again.test_y, first.test_y)


def test_a_changed_data_set_is_decoded_again(write_images, folder, colour_images):
    import dome_lab.paper.tasks

    write_images("cifar10", colour_images[:6], colour_images[6:])
    before = load_task("cifar10", data_dir=folder)
    write_images("cifar10", colour_images[3:], colour_images[:3])
    dome_lab.paper.tasks._load.cache_clear()
    after = load_task("cifar10", data_dir=folder)
    assert not torch.equal(before.train_x, after.train_x)


def test_a_subset_is_normalised_by_itself(write_images, folder, colour_images):
    write_images("cifar10", colour_images[:6], colour_images[6:])
    task = load_task("cifar10", num_train=4, num_classes=2, data_dir=folder)
    assert sorted(task.train_y.tolist()) == [0, 0, 1, 1]
    assert task.test_y.tolist() == [0, 1]
    assert task.num_classes == 2
    means = task.train_x.mean((0, 2, 3))
    torch.testing.assert_close(means, torch.zeros(3), atol=1e-5, rtol=0)
    scales = task.train_x.std((0, 2, 3), correction=0)
    torch.testing.assert_close(scales, torch.ones(3))


def test_means_of_many_pixels_are_exact(rng):
    # 20 million pixels: sums in float32 would be off in the first digits.
    x = torch.randint(256, (20, 1, 1024, 1024), generator=rng, dtype=torch.uint8)
    y = torch.arange(20) % 2
    task = image_task("large", x, y, x[:1], y[:1], Selection())
    normalised = task.train_x.double()
    assert abs(float(normalised.mean())) < 1e-5
    assert float(normalised.std()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "content", [b"", b"no image", "truncated"], ids=["empty", "foreign", "truncated"]
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_image_that_cannot_be_read_is_named_by_its_row(
    write_images, folder, colour_images, split, content
):
    stored = [{"bytes": png(image), "path": None} for image in colour_images]
    broken = stored[0]["bytes"][:70] if content == "truncated" else content
    parts = {"train": stored[:6], "test": stored[6:]}
    parts[split][2] = {"bytes": broken, "path": None}
    write_images("cifar10", **parts)
    message = f"uoft-cs/cifar10, split '{split}': the image of row 2 cannot be read"
    with pytest.raises(ValueError, match=message):
        load_task("cifar10", data_dir=folder)


def test_a_missing_image_is_named_by_its_row(write_images, folder, colour_images):
    write_images("cifar10", [*colour_images[:4], None], colour_images[6:])
    with pytest.raises(ValueError, match="row 4 cannot be read"):
        load_task("cifar10", data_dir=folder)


def test_an_image_of_another_size_is_named_by_its_row(
    write_images, folder, colour_images
):
    wide = colour_images[0].resize((8, 4))
    write_images("cifar10", colour_images[:6], [colour_images[6], wide])
    with pytest.raises(ValueError, match="row 1 has 8 x 4 pixels, the first one 6 x 4"):
        load_task("cifar10", data_dir=folder)


def test_a_column_of_something_else_is_refused(write_split, folder):
    source = IMAGE_SETS["cifar10"].source
    for split in ("train", "test"):
        write_split(source, split, {"img": [4, 5], "label": [0, 1]})
    with pytest.raises(ValueError, match=r"row 0 cannot be read .not an image but 4"):
        load_task("cifar10", data_dir=folder)


def test_images_without_the_hubs_notes_are_read_too(write_split, folder, colour_images):
    source = IMAGE_SETS["cifar10"].source
    stored = [{"bytes": png(image), "path": "a.png"} for image in colour_images[:3]]
    for split in ("train", "test"):
        write_split(source, split, {"img": stored, "label": [0, 1, 2]})
    assert load_task("cifar10", data_dir=folder).train_x.shape == (3, 3, 4, 6)


@pytest.mark.parametrize("label", [None, -1])
def test_a_missing_label_is_named_by_its_row(
    write_images, folder, colour_images, label
):
    labels = [0, 1, label]
    write_images("cifar10", colour_images[:3], colour_images[3:6], train_y=labels)
    with pytest.raises(ValueError, match=f"label of row 2 is {label}"):
        load_task("cifar10", data_dir=folder)


def test_a_test_label_that_training_lacks_is_refused(
    write_images, folder, colour_images
):
    labels = [0, 1, 3]
    write_images("cifar10", colour_images[:6], colour_images[6:], test_y=labels)
    with pytest.raises(ValueError, match="test label 3 is not among the 3 classes"):
        load_task("cifar10", data_dir=folder)


def test_a_constant_channel_is_refused(write_images, folder, colour_images):
    black = [Image.new("RGB", (6, 4)) for _ in range(6)]
    write_images("cifar10", black, colour_images[6:])
    with pytest.raises(ValueError, match="a channel is the same in all training"):
        load_task("cifar10", data_dir=folder)


def test_the_modes_have_caches_of_their_own(
    write_images, folder, colour_images, monkeypatch
):
    write_images("cifar10", colour_images[:6], colour_images[6:])
    assert load_task("cifar10", data_dir=folder).train_x.shape[1] == 3
    grey = replace(IMAGE_SETS["cifar10"], mode="L")
    monkeypatch.setitem(IMAGE_SETS, "cifar10", grey)
    small = load_task("cifar10", num_train=3, data_dir=folder)
    assert small.train_x.shape[1] == 1
