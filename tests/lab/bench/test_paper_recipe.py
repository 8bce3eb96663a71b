import torch
from models import batches, small_classifier
from reference import projector_distance
from torch.nn.functional import cross_entropy

import dome
from dome.reference import Dome
from dome_lab.bench.paper_recipe import PaperRecipe, quiet_hooks

RANK = 5  # at most the batch's 12 samples less one: the samples determine every column
LEARNING_RATE = 0.1


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def random_basis(dim):
    rng = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(dim, RANK, generator=rng, dtype=torch.float64))[
        0
    ]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model, forward, optimizer, rng):
    for x, y in batches(rng, 6):
        optimizer.zero_grad()
        cross_entropy(forward(x), y).backward()
        optimizer.step()


def test_the_literal_recipe_and_attach_train_the_same_network(rng):
    literal, ours = small_classifier(), small_classifier()
    recipe = PaperRecipe(literal, RANK)
    literal_optimizer, our_optimizer = optimizer_of(literal), optimizer_of(ours)
    grad_filter = dome.attach(ours, our_optimizer, RANK)
    recipe.basis = grad_filter.trackers["all"].basis.clone()
    literal_optimizer.register_step_pre_hook(lambda *_: recipe.filter_())

    state = rng.get_state()
    with quiet_hooks():
        train(literal, recipe.model, literal_optimizer, rng)
    train(ours, ours, our_optimizer, rng.set_state(state))

    torch.testing.assert_close(flat(ours), flat(literal))
    basis = grad_filter.trackers["all"].basis
    assert projector_distance(basis, recipe.basis) < 1e-9


def test_the_literal_recipe_is_algorithm_1_with_a_loop_over_samples(rng):
    model, twin_model = small_classifier(), small_classifier()
    recipe = PaperRecipe(model, RANK)
    recipe.basis = random_basis(flat(model).numel())
    twin = Dome(twin_model, recipe.basis.clone())
    for x, y in batches(rng, 3):
        model.zero_grad()
        with quiet_hooks():
            cross_entropy(recipe.model(x), y).backward()
        recipe.filter_()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(grads, twin.filtered(cross_entropy, x, y))
