import torch
from models import batches, small_classifier
from torch.nn.functional import cross_entropy

import dome
from dome.trackers import TRACKERS


class Mean:
    """Removes the direction of the newest batch's mean: a tracker in thirty lines."""

    last_update, num_skipped, orthogonality_error = None, 0, 0.0

    def __init__(self, dim, rank, **options):
        dtype = options.get("dtype", torch.float64)
        self.basis = torch.zeros(dim, 1, dtype=dtype)
        self.eigenvalues = torch.zeros(1, dtype=dtype)

    @property
    def effective_rank(self):
        return float(self.eigenvalues[0] > 0)

    def update(self, grads, scale=1.0):
        mean = scale * grads.mean(dim=0)
        self.eigenvalues[0] = mean.norm()
        self.basis[:, 0] = mean / mean.norm()

    def project_out(self, gradient, strength=1.0):
        return gradient - strength * self.basis @ (self.basis.T @ gradient)

    def state_dict(self):
        return {"basis": self.basis.clone(), "length": self.eigenvalues.clone()}

    def load_state_dict(self, state):
        self.basis.copy_(state["basis"])
        self.eigenvalues.copy_(state["length"])


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_tracker_is_one_new_class_and_one_line(rng, monkeypatch):
    monkeypatch.setitem(TRACKERS, "mean", Mean)  # the line
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=1, tracker="mean")
    for x, y in batches(rng, 3):
        step(model, optimizer, x, y)
    # The mean of the samples is the gradient: nothing is left of it.
    assert grad_filter.stats.kept_norm < 1e-12
    again = dome.GradientFilter(small_classifier(), rank=1, tracker="mean")
    again.load_state_dict(grad_filter.state_dict())
    assert torch.equal(again.trackers["all"].basis, grad_filter.trackers["all"].basis)


def test_a_function_makes_trackers_for_every_layer_beside_ours(rng):
    made = []

    def make(dim, rank):
        made.append(Mean(dim, rank) if not made else dome.StreamingPower(dim, rank))
        return made[-1]

    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(
        model, optimizer, rank=1, tracker=make, layout="layerwise"
    )
    for x, y in batches(rng, 2):
        step(model, optimizer, x, y)
    assert list(grad_filter.trackers.values()) == made
    assert grad_filter.stats.effective_rank == 2
