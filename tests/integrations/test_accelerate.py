import pytest
import torch
from accelerate import Accelerator
from loops import digits_like, flat, literal, plain, sgd
from models import small_classifier
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dome
from dome.compression import ErrorFeedback, TopK
from dome.integrations.accelerate import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # Accelerate's own advice


def loader():
    return DataLoader(TensorDataset(*digits_like(48)), batch_size=12)


def prepared(accumulate=1, make=sgd, rank=4, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = small_classifier()
    parts = accelerator.prepare(model, make(model), loader())
    grad_filter = attach(*parts[:2], rank, **options)
    return accelerator, *parts, grad_filter


def train(accelerator, model, optimizer, data, epochs):
    for _ in range(epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_gives_the_numbers_of_the_plain_loop(accumulate):
    *parts, grad_filter = prepared(accumulate)
    train(*parts, epochs=2)
    expected, _ = plain([*loader(), *loader()], accumulate=accumulate)
    assert torch.equal(flat(parts[1]), expected)
    assert grad_filter.stats.step == 8 // accumulate
    grad_filter.detach()


def test_accumulation_agrees_with_algorithm_one_on_the_batch_as_a_whole():
    *parts, grad_filter = prepared(
        2, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.3)
    )
    train(*parts, epochs=1)
    torch.testing.assert_close(flat(parts[1]), literal([*loader()], accumulate=2))
    grad_filter.detach()


def test_a_saved_state_goes_on_bit_for_bit(tmp_path):
    def start():
        accelerator, *parts = prepared(after=ErrorFeedback(TopK(rate=5)))
        accelerator.register_for_checkpointing(parts[-1])
        return accelerator, *parts

    *parts, _ = start()
    train(*parts, epochs=1)
    parts[0].save_state(str(tmp_path / "state"))
    train(*parts, epochs=1)

    *again, grad_filter = start()
    again[0].load_state(str(tmp_path / "state"))
    train(*again, epochs=1)
    assert torch.equal(flat(again[1]), flat(parts[1]))
    assert grad_filter.stats.step == 8


def test_the_scaler_of_a_prepared_optimizer_is_found():
    _, model, optimizer, _, grad_filter = prepared()
    grad_filter.detach()
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    grad_filter = attach(model, optimizer, rank=4)
    assert grad_filter._options.scaler is optimizer.scaler
    grad_filter.detach()


def test_dome_attach_says_what_to_do_with_a_prepared_optimizer():
    _, model, optimizer, _, grad_filter = prepared()
    grad_filter.detach()
    with pytest.raises(ValueError, match=r"dome\.integrations\.accelerate\.attach"):
        dome.attach(model, optimizer, rank=4)
