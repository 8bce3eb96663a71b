import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome_lab.paper.models import EncoderLayer, Transformer
from dome_lab.paper.tasks.texts import CLS, LENGTH, PADDING


@pytest.fixture
def texts(rng):
    texts = torch.randint(3, 30, (5, 12), generator=rng)
    texts[:, 0] = CLS
    texts[1, 7:] = PADDING
    texts[2, 1:] = PADDING  # an empty text
    return texts


@pytest.fixture
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(30, 4, length=12).double()


def test_has_the_parameters_of_the_paper():
    model = Transformer(8000, 70)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    attention = 4 * (64 * 64 + 64)
    feed_forward = 2 * 64 * 256 + 256 + 64
    layer = attention + feed_forward + 4 * 64
    ends = 8000 * 64 + LENGTH * 64 + 64 * 70 + 70
    assert sum(sizes.values()) == ends + 3 * layer == 670_598


def test_captured_samples_are_right(model, texts):
    report = dome.verify(model, cross_entropy, texts, torch.tensor([0, 1, 2, 3, 0]))
    assert report.ok, str(report)


def test_every_parameter_is_trained(model, texts):
    cross_entropy(model(texts), torch.tensor([0, 1, 2, 3, 0])).backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


def test_padding_makes_no_difference(model, texts):
    before = model(texts)
    model.words.weight.data[PADDING] += 100
    torch.testing.assert_close(model(texts), before)


def test_order_makes_a_difference(model, texts):
    turned = texts.clone()
    turned[0, 1:] = texts[0, 1:].flip(0)
    assert not torch.allclose(model(turned)[0], model(texts)[0])


def test_treats_samples_independently(model, texts):
    torch.testing.assert_close(model(texts)[1:2], model(texts[1:2]))


def test_training_and_evaluation_agree(model, texts):
    trained = model.train()(texts)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(texts), trained)


def test_a_layer_agrees_with_torchs_own(rng):
    ours = EncoderLayer().double()
    theirs = nn.TransformerEncoderLayer(
        64, 4, 256, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj_": "query_key_value.",
        "self_attn.out_proj.": "merge.",
        "linear1.": "widen.",
        "linear2.": "narrow.",
        "norm1.": "attention_norm.",
        "norm2.": "feed_forward_norm.",
    }
    state = {
        their_name + kind: torch.randn(
            ours.state_dict()[name + kind].shape, generator=rng, dtype=torch.float64
        )
        for their_name, name in names.items()
        for kind in ("weight", "bias")
    }
    theirs.load_state_dict(state)
    ours.load_state_dict(
        {
            name + kind: state[their_name + kind]
            for their_name, name in names.items()
            for kind in ("weight", "bias")
        }
    )
    x = torch.randn(3, 7, 64, generator=rng, dtype=torch.float64)
    seen = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    expected = theirs(x, src_key_padding_mask=~seen)
    torch.testing.assert_close(ours(x, seen[:, None, None, :]), expected)
