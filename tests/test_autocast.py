import pytest
import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.compression import PowerSGD

OPTIONS = {
    "power": {},
    "svd": {"tracker": "svd"},
    "layer-wise": {"layout": "layerwise"},
    "low rank": {"direction_rank": 2},
    "stream": {"stream": True, "layout": "layerwise"},
    "compressed": {"after": PowerSGD},
}


def trained(step_inside, options):
    """Parameters after some steps, taken under autocast or behind it."""
    model = small_classifier(torch.float32)
    if "after" in options:
        options = {"after": options["after"]([p.shape for p in model.parameters()])}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dome.attach(model, optimizer, 4, **options):
        for x, y in batches(torch.Generator().manual_seed(3), 4, dtype=torch.float32):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x), y)
                if step_inside:
                    loss.backward()
                    optimizer.step()
            if not step_inside:
                loss.backward()
                optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_step_under_autocast_is_the_step_without(options):
    """Products of float32 numbers would keep 8 bits there, or not go together."""
    assert torch.equal(trained(True, options), trained(False, options))


@pytest.mark.parametrize("tracker", [dome.StreamingPower, dome.IncrementalSVD])
def test_a_tracker_by_itself_keeps_its_precision_under_autocast(tracker):
    generator = torch.Generator().manual_seed(0)
    outside, inside = tracker(300, 3), tracker(300, 3)
    for _ in range(5):
        G = torch.randn(8, 300, generator=generator)
        outside.update(G)
        with torch.autocast("cpu", torch.bfloat16):
            inside.update(G)
            left = inside.project_out(G[0])
        assert torch.equal(left, outside.project_out(G[0]))
    assert torch.equal(inside.basis, outside.basis)
