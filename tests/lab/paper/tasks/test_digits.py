import torch

from dome_lab.paper.tasks.digits import digits


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
