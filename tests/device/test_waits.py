import re
from pathlib import Path

import pytest
import torch
from device.training import attached, seeded_batches
from torch.nn.functional import cross_entropy

import dome
from dome.compression import (
    QSGD,
    ErrorFeedback,
    GaussianSketch,
    HadamardSketch,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from dome.samples.store import group

ROOT = Path(__file__).parents[2]

# Waits of a step, at most, in the order of docs/results/performance.md.
STEP = {
    "power": ({}, 2),
    "16 bits": ({"basis_dtype": torch.bfloat16}, 2),
    "now and then": ({"update_every": 2}, 2),
    "forgetting": ({"forget": 0.3}, 2),
    "layer-wise": ({"layout": "layerwise"}, 2),
    "layer-wise, other ranks": ({"layout": "layerwise", "rank": {"0": 3, "2": 2}}, 2),
    "low rank": ({"direction_rank": 2}, 2),
    "layer-wise, low rank": ({"layout": "layerwise", "direction_rank": 2}, 2),
    "a sketch": ({"after": GaussianSketch(4.0)}, 2),
    "oversampled": ({"oversample": 4}, 2),
    "svd": ({"tracker": "svd"}, 2),
    "layer-wise svd": ({"tracker": "svd", "layout": "layerwise"}, 2),
}
# One wait more: whether what is sent, and what comes of it, is finite.
MESSAGES = {
    "topk": lambda: TopK(4.0),
    "randomk": lambda: RandomK(4.0),
    "signsgd": SignSGD,
    "qsgd": lambda: QSGD(3),
    "terngrad": TernGrad,
    "hadamard": lambda: HadamardSketch(4.0),
    "topk with feedback": lambda: ErrorFeedback(TopK(4.0)),
}
MESSAGE = 3


def test_the_page_has_these_numbers():
    page = (ROOT / "docs" / "results" / "performance.md").read_text()
    table = page.partition("<!-- waits -->")[2].partition("<!-- end of waits -->")[0]
    rows = dict(re.findall(r"^\| (.+) \| (\d+) \|$", table, re.MULTILINE))
    assert {name: int(most) for name, most in rows.items()} == {
        "forward and backward": 0,
        **{f"a step: {name}": most for name, (_, most) in STEP.items()},
        "a step: a compressor after the filter": MESSAGE,
        "`.stats`": 1,
    }


def told(waits):
    return "\n".join(map(str, waits))


def steps(device, num=4, **options):
    """Waits of forward and backward, of the step and of .stats, step by step."""
    model, optimizer, grad_filter = attached(device.name, **options)
    for x, y in seeded_batches(num):
        inputs, targets = x.to(device.name), y.to(device.name)
        optimizer.zero_grad()
        with device.counting() as before:
            cross_entropy(model(inputs), targets).backward()
        with device.counting() as during:
            optimizer.step()
        with device.counting() as after:
            _ = grad_filter.stats
        yield before, during, after


def test_forward_and_backward_do_not_wait(simulated):
    for before, _, _ in steps(simulated):
        assert not before, told(before)


@pytest.mark.parametrize(("options", "most"), STEP.values(), ids=STEP.keys())
def test_a_step_waits_no_more_often_than_it_must(options, most, simulated):
    _, *settled = steps(simulated, **options)
    for before, during, _ in settled:
        assert not before, told(before)
        assert len(during) <= most, told(during)


# How orthogonal directions of low rank are is computed when it is asked for.
@pytest.mark.parametrize("name", [n for n in STEP if not re.search("sketch|low", n)])
def test_stats_wait_once(name, simulated):
    options, _ = STEP[name]
    for _, _, after in steps(simulated, **options):
        assert len(after) == 1, told(after)


def test_a_stream_by_layers_waits_once_a_layer_and_not_at_the_step(simulated):
    _, *settled = steps(simulated, stream=True, layout="layerwise")
    for before, during, _ in settled:
        assert len(before) == 2, told(before)  # layers with samples
        assert not during, told(during)


def test_waits_do_not_grow_with_the_number_of_layers(simulated):
    counts = []
    for width in (1, 6):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(8, 8) for _ in range(width)), torch.nn.Linear(8, 3)
        ).to(simulated.name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dome.attach(model, optimizer, 3, layout="layerwise")
        for x, y in seeded_batches(3):
            optimizer.zero_grad()
            inputs, targets = x.to(simulated.name), y.to(simulated.name)
            cross_entropy(model(inputs), targets).backward()
            with simulated.counting() as waits:
                optimizer.step()
        counts.append(len(waits))
    assert counts[1] <= counts[0], told(waits)


def test_the_words_of_a_large_embedding_take_one_wait_in_the_step(
    simulated, monkeypatch
):
    monkeypatch.setattr(group, "LARGE", 1)
    random, ends = torch.Generator().manual_seed(7), []
    batches = [torch.randint(20, (6, 2), generator=random) for _ in range(4)]
    for place in ("cpu", simulated.name):
        torch.manual_seed(0)
        words = torch.nn.EmbeddingBag(50, 3)
        model = torch.nn.Sequential(words, torch.nn.Linear(3, 3)).to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grad_filter = dome.attach(model, optimizer, 2)
        if place == "cpu":
            start = grad_filter.state_dict()
        grad_filter.load_state_dict(start)
        for i, texts in enumerate(batches):
            optimizer.zero_grad()
            inputs, targets = texts.to(place), (texts[:, 0] % 3).to(place)
            with simulated.counting() as before:
                cross_entropy(model(inputs), targets).backward()
            with simulated.counting() as during:
                optimizer.step()
            assert not before, told(before)
            assert i == 0 or len(during) <= 3, told(during)
        ends.append(words.weight.detach().cpu())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("make", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_compressor_waits_once_more(make, simulated):
    counts = []
    for before, during, _ in steps(simulated, num=8, after=make()):
        assert not before, told(before)
        counts.append(len(during))
    # A step that makes U orthonormal again waits more often; few do.
    assert sorted(counts)[len(counts) // 2] <= MESSAGE, counts
