import pytest
import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import dome
from dome.reference import per_sample_loop


def columns(G, model, parameters):
    wanted, parts = {id(p) for p in parameters}, []
    pieces = G.split([p.numel() for p in model.parameters()], dim=1)
    for p, piece in zip(model.parameters(), pieces, strict=True):
        if id(p) in wanted:
            parts.append(piece)
    return torch.cat(parts, 1)


def gradient_of(parameters):
    return torch.cat([p.grad.flatten() for p in parameters])


def projector(tracker):
    return tracker.basis @ tracker.basis.T


@pytest.mark.parametrize("samples", ["per_sample", "microbatch"])
def test_two_optimizers_of_one_model_filter_each_their_own_part(samples, rng):
    model = small_classifier()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    # Muon is in torch since 2.9.
    muon = getattr(torch.optim, "Muon", torch.optim.SGD)(matrices, lr=0.01)
    adamw = torch.optim.AdamW(rest, lr=0.01)
    filters = [
        dome.attach(model, optimizer, rank=3, samples=samples)
        for optimizer in (muon, adamw)
    ]
    twins = [
        dome.StreamingPower(sum(p.numel() for p in part), 3, dtype=torch.float64)
        for part in (matrices, rest)
    ]
    for x, y in batches(rng, 4, size=24):
        model.zero_grad()
        G = per_sample_loop(model, cross_entropy, x, y)
        rows, parts = G, [slice(None)]
        if samples == "microbatch":
            parts = [slice(i, i + 3) for i in range(0, 24, 3)]
            rows = torch.stack([G[part].mean(0) for part in parts])
        for part in parts:
            (cross_entropy(model(x[part]), y[part]) / len(parts)).backward()
        expected = []
        for twin, part in zip(twins, (matrices, rest), strict=True):
            twin.update(columns(rows, model, part))
            expected.append(twin.project_out(gradient_of(part)))
        muon.step()
        adamw.step()
        for grad_filter, twin, part, g in zip(
            filters, twins, (matrices, rest), expected, strict=True
        ):
            assert_close(projector(grad_filter.trackers["all"]), projector(twin))
            assert_close(gradient_of(part), g)
            assert grad_filter.stats.skipped_updates == 0


def test_one_optimizer_per_parameter_that_steps_inside_backward(rng):
    model, plain = small_classifier(), small_classifier()
    filters, grads = [], {}

    def keep(p, name, optimizer):
        optimizer.step()
        grads[name] = p.grad
        optimizer.zero_grad()

    for name, p in model.named_parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        filters.append(dome.attach(model, optimizer, rank=2))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name, optimizer=optimizer: keep(p, name, optimizer)
        )
    layers = list(plain.parameters())
    twins = [dome.StreamingPower(p.numel(), 2, dtype=torch.float64) for p in layers]
    for x, y in batches(rng, 4):
        plain.load_state_dict(model.state_dict())
        G = per_sample_loop(plain, cross_entropy, x, y)
        cross_entropy(model(x), y).backward()
        pieces = G.split([p.numel() for p in layers], dim=1)
        for name, twin, piece in zip(
            dict(model.named_parameters()), twins, pieces, strict=True
        ):
            twin.update(piece)
            assert_close(grads[name].flatten(), twin.project_out(piece.mean(0)))
    assert all(f.stats.step == 4 for f in filters)


def test_detaching_one_filter_leaves_the_other_its_samples(rng):
    model = small_classifier()
    first, second = (
        dome.attach(model, torch.optim.SGD(part.parameters(), lr=0.1), rank=2)
        for part in (model[0], model[2])
    )
    first.detach()
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    second.step()
    assert second.stats.effective_rank > 0


def test_filters_that_take_samples_at_different_steps_do_not_disturb_each_other(rng):
    model = small_classifier()
    often, seldom = (
        dome.GradientFilter(model, 2, update_every=n, parameters=part.parameters())
        for n, part in ((1, model[0]), (3, model[2]))
    )
    turned = []
    for x, y in batches(rng, 6):
        model.zero_grad()
        before = [f.trackers["all"].basis.clone() for f in (often, seldom)]
        cross_entropy(model(x), y).backward()
        often.step()
        seldom.step()
        pairs = zip(before, (often, seldom), strict=True)
        turned.append([not torch.equal(b, f.trackers["all"].basis) for b, f in pairs])
    assert [a for a, _ in turned] == [True] * 6
    assert [b for _, b in turned] == [True, False, False] * 2
