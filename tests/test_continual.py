import pytest
import torch
from models import batches, small_classifier
from safetensors.torch import load, save
from torch.nn.functional import cross_entropy

import dome
from dome.continual import EWC
from dome.reference import per_sample_loop


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def move(model, rng):
    """Another place, as if a task had been learned."""
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.numel(), generator=rng, dtype=p.dtype)
            p.add_(0.3 * noise.view(p.shape))


def literal(model, tasks, strength, decay):
    """One parabola a task: pairs of a Fisher diagonal and a place."""
    total = 0.0
    for age, (fisher, place) in enumerate(reversed(tasks)):
        total += decay**age * (fisher * (parameters(model) - place).square()).sum()
    return strength / 2 * total


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_penalty_of_many_tasks_is_the_sum_of_their_parabolas(rng, decay):
    model = small_classifier()
    ewc, tasks = EWC(model, 3.0, decay=decay), []
    assert ewc.penalty() == 0
    for number in range(1, 5):
        move(model, rng)
        seen = list(batches(rng, 3))
        ewc.consolidate(cross_entropy, seen)
        G = torch.cat([per_sample_loop(model, cross_entropy, *b) for b in seen])
        tasks.append((G.square().mean(dim=0), parameters(model)))
        move(model, rng)
        expected = literal(model, tasks, 3.0, decay)
        torch.testing.assert_close(ewc.penalty().detach(), expected)
        assert ewc.num_tasks == number


def test_the_gradient_is_that_of_the_penalty(rng):
    model = small_classifier()
    ewc = EWC(model, 3.0)
    for _ in range(2):
        ewc.consolidate(cross_entropy, batches(rng, 2))
        move(model, rng)
    grads = torch.autograd.grad(ewc.penalty(), list(model.parameters()))
    flat = torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(ewc.gradient(), flat)
    g = torch.ones_like(flat)
    torch.testing.assert_close(ewc(g), g + flat)


@pytest.mark.parametrize("layout", ["global", "layerwise"])
def test_the_filtered_fisher_is_that_of_what_the_filter_leaves(rng, layout):
    model = small_classifier()
    grad_filter = dome.GradientFilter(model, 2, layout=layout)
    for x, y in batches(rng, 3):
        cross_entropy(model(x), y).backward()
        grad_filter.step()
    ((x, y),) = batches(rng, 1)
    ewc = EWC(model, 1.0)
    ewc.consolidate(cross_entropy, [(x, y)], grad_filter=grad_filter)
    expected = torch.zeros_like(ewc.fisher)
    for g in per_sample_loop(model, cross_entropy, x, y):
        left, start = [], 0
        for tracker in grad_filter.trackers.values():
            U = tracker.basis
            piece = g[start : start + len(U)]
            left.append(piece - U @ (U.T @ piece))
            start += len(U)
        expected += torch.cat(left).square() / len(x)
    torch.testing.assert_close(ewc.fisher, expected)
    assert ewc.fisher.sum() < per_sample_loop(model, cross_entropy, x, y).square().sum()


def test_behind_the_filter_the_penalty_is_not_filtered(rng):
    model = small_classifier()
    ewc = EWC(model, 5.0)
    ewc.consolidate(cross_entropy, batches(rng, 2))
    move(model, rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dome.attach(model, optimizer, 195, after=ewc):
        for x, y in batches(rng, 1, size=300):  # all 195 directions are removed
            cross_entropy(model(x), y).backward()
            optimizer.step()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(got, ewc.gradient(), rtol=1e-4, atol=1e-6)


def test_labels_of_the_model_give_the_fisher_itself(rng):
    model = small_classifier()
    ((x, y),) = batches(rng, 1, size=4)
    ewc = EWC(model, 1.0)
    many = (x.repeat(1000, 1), y.repeat(1000))
    ewc.consolidate(cross_entropy, [many], labels="model", generator=rng)
    chances = model(x).softmax(dim=1).detach()
    expected = torch.zeros_like(ewc.fisher)
    for label in range(3):
        targets = torch.full_like(y, label)
        G = per_sample_loop(model, cross_entropy, x, targets)
        expected += (chances[:, label, None] * G.square()).mean(dim=0)
    # 4,000 labels: a mean of squares is known to a few per cent.
    assert (ewc.fisher - expected).norm() < 0.1 * expected.norm()


def test_gradients_of_the_loop_are_left_alone(rng):
    model = small_classifier()
    ((x, y),) = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    EWC(model, 1.0).consolidate(cross_entropy, [(x, y)])
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def test_the_state_goes_through_safetensors_and_resumes(rng):
    model = small_classifier()
    ewc = EWC(model, 2.0)
    for _ in range(2):
        ewc.consolidate(cross_entropy, batches(rng, 2))
        move(model, rng)
    again = EWC(model, 2.0)
    again.load_state_dict(load(save(ewc.state_dict())))
    assert torch.equal(again.penalty(), ewc.penalty())
    assert again.num_tasks == 2
    with pytest.raises(ValueError, match="another model"):
        EWC(torch.nn.Linear(8, 3), 1.0).load_state_dict(ewc.state_dict())


def test_it_keeps_an_old_task(rng):
    """Two tasks that ask for different inputs, on one small network."""
    x = torch.randn(400, 8, generator=rng, dtype=torch.float64)
    tasks = [(x, (x[:, i] > 0).long()) for i in range(2)]
    kept = {}
    for strength in (0.0, 300.0):
        model = small_classifier()
        ewc = EWC(model, strength)
        for x, y in tasks:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(150):
                optimizer.zero_grad()
                (cross_entropy(model(x), y) + ewc.penalty()).backward()
                optimizer.step()
            ewc.consolidate(cross_entropy, [(x, y)])
        x, y = tasks[0]
        kept[strength] = float((model(x).argmax(dim=1) == y).double().mean())
    assert kept[300.0] > kept[0.0] + 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1.0}, "strength must be a number of at least 0, got -1.0"),
        ({"strength": float("nan")}, "strength must be"),
        ({"strength": 1.0, "decay": 0.0}, "decay must lie in"),
        ({"strength": 1.0, "decay": 1.1}, "decay must lie in"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EWC(small_classifier(), **options)


def test_bad_batches_are_refused(rng):
    ewc = EWC(small_classifier(), 1.0)
    with pytest.raises(ValueError, match="no samples"):
        ewc.consolidate(cross_entropy, [])
    with pytest.raises(ValueError, match="'data' or 'model', got 'true'"):
        ewc.consolidate(cross_entropy, batches(rng, 1), labels="true")
    ((x, y),) = batches(rng, 1)
    with pytest.raises(ValueError, match="not finite"):
        ewc.consolidate(cross_entropy, [(x * float("nan"), y)])
