from importlib import import_module

import torch
from sklearn.datasets import load_digits

from dome_lab.paper.tasks.images import digits


def test_images_are_those_of_scikit_learn_with_its_import_and_without(monkeypatch):
    module = import_module("dome_lab.paper.tasks.images")  # a function has its name
    pixels, labels = load_digits(return_X_y=True)
    x, y = module._images()
    assert torch.equal(x.flatten(1).double(), torch.as_tensor(pixels))
    assert torch.equal(y, torch.as_tensor(labels))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    imported = module._images()
    assert torch.equal(imported[0], x)
    assert torch.equal(imported[1], y)


def test_training_pixels_are_normalised():
    task = digits()
    assert task.train_x.shape[1:] == (1, 16, 16)
    torch.testing.assert_close(float(task.train_x.mean()), 0.0, atol=1e-5, rtol=0)
    # Pixels in float32.
    torch.testing.assert_close(float(task.train_x.std()), 1.0, atol=1e-5, rtol=0)


def test_images_may_keep_their_size():
    assert digits(size=8).train_x.shape[1:] == (1, 8, 8)


def test_split_is_fixed_by_its_seed():
    assert torch.equal(digits(3).test_x, digits(3).test_x)
    assert not torch.equal(digits(3).test_y, digits(4).test_y)


def test_train_and_test_hold_every_image_once():
    task = digits()
    assert len(task.train_x) + len(task.test_x) == 1797
    assert set(task.test_y.tolist()) == set(range(task.num_classes))
