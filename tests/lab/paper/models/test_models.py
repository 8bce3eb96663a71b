import pytest
import torch

from dome_lab.paper.models import make_model
from dome_lab.paper.tasks import load_task


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("mlp", "digits"),
        ("relu_mlp", "digits"),
        ("resnet8", "digits"),
        ("resnet18", "digits"),
        ("transformer", "made_text"),
        ("tanh_cnn", "digits"),
    ],
)
def test_every_model_fits_its_task(model, task):
    task = load_task(task, num_classes=3)
    with torch.no_grad():
        assert make_model(model, task)(task.test_x[:2]).shape == (2, 3)


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ("resnet8", "made_text", "'resnet8' takes images, task 'made_text' has texts"),
        ("mlp", "made_text", "'mlp' takes images, task 'made_text' has texts"),
        ("resnet18", "made_text", "choose model 'transformer'"),
        ("transformer", "digits", "takes texts, task 'digits' has images"),
        ("tanh_cnn", "made_text", "'tanh_cnn' takes images"),
        ("relu_mlp", "made_text", "'relu_mlp' takes images"),
    ],
)
def test_a_model_for_other_inputs_is_refused(model, task, message):
    with pytest.raises(ValueError, match=message):
        make_model(model, load_task(task))
