import copy
import math

import pytest
import torch
from models import small_classifier
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from privacy.setting import (
    CLIP,
    attach,
    attached,
    flat_grad,
    public_batches,
    samples,
    train,
)
from reference import largest_angle
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dome
from dome.privacy.bases import BASES
from dome.privacy.releases import Randomness
from dome.privacy.sampling import PoissonSampler
from dome.reference import per_sample_loop

SILENT = 1e-9  # a noise multiplier with which nothing but the noise is missing


class Twin:
    """The private step, literally: loops over samples, full projectors, no noise."""

    def __init__(self, basis, rank, dim, expected, update_every=1, window=8):
        self.basis, self.rank, self.expected = basis, rank, expected
        self.update_every, self.window = update_every, window
        self.tracker = dome.IncrementalSVD(dim, rank, dtype=torch.float64)
        self.P = torch.eye(dim, dtype=torch.float64)
        self.recent, self.step = [], 0

    def gradient(self, G, public):
        if self.basis == "public":
            if self.step % self.update_every == 0:
                self.tracker.update(public)
            self._turn()
        looks = self.basis == "released" and self.step % self.update_every == 0
        total = torch.zeros(G.shape[1], dtype=torch.float64)
        for g in G:
            h = g if looks else self.P @ g
            total += h * min(1.0, CLIP / float(h.norm()))
        release = total / self.expected
        gradient = self.P @ release
        if looks:
            self.recent.append(release)
            if len(self.recent) == self.window:
                self.tracker.update(torch.stack(self.recent))
                self.recent = []
                self._turn()
        self.step += 1
        return gradient

    def _turn(self):
        U = self.tracker.basis
        self.P = torch.eye(len(U), dtype=torch.float64) - U @ U.T


@pytest.mark.parametrize("update_every", [1, 3])
@pytest.mark.parametrize("basis", ["public", "released"])
def test_every_step_is_that_of_the_literal_twin(basis, update_every):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = samples(9)
    private = attach(
        model,
        optimizer,
        basis,
        noise_multiplier=SILENT,
        update_every=update_every,
        window=3,
    )
    twin = Twin(basis, 2, 195, 9.0, update_every, window=3)
    public = [per_sample_loop(model, cross_entropy, *b) for b in public_batches()]
    loader = private.loader(TensorDataset(x, y))
    for step in range(12):
        G = per_sample_loop(model, cross_entropy, x, y)
        turn = public_batches()[step // update_every % len(public)]
        expected = twin.gradient(G, per_sample_loop(model, cross_entropy, *turn))
        for a, b in loader:
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            optimizer.step()
        # A millionth of C is left out; the noise is a billionth.
        torch.testing.assert_close(flat_grad(model), expected, rtol=1e-5, atol=1e-7)


def test_the_private_basis_is_that_of_power_iterations_on_clipped_centred_samples():
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = samples(30)
    private = attach(model, optimizer, "private", rank=3, noise_multiplier=SILENT)
    G = per_sample_loop(model, cross_entropy, x, y)
    clipped = G * (CLIP / G.norm(dim=1)).clamp(max=1.0)[:, None]
    H = (clipped - clipped.mean(dim=0)) / CLIP
    U, norms = private._basis.moment_basis.clone(), torch.ones(3, dtype=torch.float64)
    for t in range(1, 6):
        train(model, optimizer, private, private._loader.dataset if t > 1 else (x, y))
        W = H.T @ (H @ U) / len(G)
        Y = W if t == 1 else (t - 1) / t * U * norms + W / t
        norms, U = Y.norm(dim=0), torch.linalg.qr(Y).Q
        assert largest_angle(U, private._basis.directions()) < 1e-4


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_rank_zero_is_dp_sgd_as_opacus_does_it():
    x, y = samples(9)
    ours = small_classifier()
    ours[1] = nn.Tanh()  # Opacus cannot hook what changes its input in place
    theirs = GradSampleModule(copy.deepcopy(ours))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.3)
    private = attach(ours, optimizer, rank=0, noise_multiplier=SILENT)
    train(ours, optimizer, private, (x, y), epochs=5)
    other = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.3),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=9,
    )
    for _ in range(5):
        other.zero_grad()
        cross_entropy(theirs(x), y).backward()
        other.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("basis", ["public", "released", "private"])
def test_the_gradient_and_its_noise_have_nothing_in_the_removed_span(basis):
    model, optimizer, private = attached(basis, rank=5, window=2)
    loader = private.loader(TensorDataset(*samples(9)))
    for _ in range(6):
        U = private._basis.directions()
        U = None if U is None else U.clone()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if U is not None and basis != "public":  # which turns within the step
            inside = U.T @ flat_grad(model)
            assert inside.norm() < 1e-10 * flat_grad(model).norm()
    assert U is not None


@pytest.mark.parametrize("basis", ["public", "released", "private"])
@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_no_and_of_one_sample_take_a_step(basis, size):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = 1.0 if size else 1e-9
    private = attach(model, optimizer, basis, sample_rate=rate, expected_batch_size=4.0)
    loader = iter(private.loader(TensorDataset(*samples(1))))
    x, y = next(loader)
    assert len(x) == len(y) == size
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert private.num_steps == 1
    g = flat_grad(model)
    assert g.isfinite().all()
    # Noise of multiplier 1 (1.15 for the private basis) on 195 numbers, over 4.
    assert g.norm() == pytest.approx(CLIP * math.sqrt(195) / 4, rel=0.35)


def test_sums_are_divided_by_the_expected_batch_size_not_by_the_realised():
    x, y = samples(40)
    norms = {}
    for rate in (0.3, 1.0):
        model, optimizer, private = attached(
            rank=0, noise_multiplier=SILENT, sample_rate=rate, lr=0.0
        )
        for a, b in private.loader(TensorDataset(x, y)):
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            G = per_sample_loop(model, cross_entropy, a, b)
            total = (G * (CLIP / G.norm(dim=1)).clamp(max=1)[:, None]).sum(dim=0)
            optimizer.step()
            torch.testing.assert_close(
                flat_grad(model), total / (40 * rate), rtol=1e-5, atol=1e-7
            )
            norms.setdefault(rate, []).append(len(a))
    assert len(set(norms[0.3])) > 1  # batches did differ in size


def test_parts_of_a_batch_add_up_when_the_loss_sums():
    x, y = samples(7)
    gradients = []
    for parts in (1, 3):
        model, optimizer, private = attached(loss_reduction="sum", lr=0.0)
        for a, b in private.loader(TensorDataset(x, y)):
            optimizer.zero_grad()
            for part in zip(a.tensor_split(parts), b.tensor_split(parts), strict=True):
                cross_entropy(model(part[0]), part[1], reduction="sum").backward()
            optimizer.step()
        gradients.append(flat_grad(model))
    torch.testing.assert_close(*gradients)


def test_a_parameter_without_a_gradient_gets_noise_all_the_same():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(8, 3), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    model = Idle().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, attach(model, optimizer), samples(5))
    assert model.idle.weight.grad.norm() > 0


def test_a_sample_that_is_not_finite_counts_as_nothing():
    x, y = samples(6)
    x[2, 0] = math.nan
    model, optimizer, private = attached(rank=0, noise_multiplier=SILENT, lr=0.0)
    train(model, optimizer, private, (x, y))
    keep = torch.tensor([0, 1, 3, 4, 5])
    G = per_sample_loop(model, cross_entropy, x[keep], y[keep])
    total = (G * (CLIP / G.norm(dim=1)).clamp(max=1)[:, None]).sum(dim=0)
    torch.testing.assert_close(flat_grad(model), total / 6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("basis", ["public", "released", "private"])
def test_the_state_resumes_basis_and_cost_and_holds_no_randomness(basis, tmp_path):
    x, y = samples(9)

    def start(**options):
        model = small_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, attach(model, optimizer, basis, window=2, **options)

    model, optimizer, private = start()
    train(model, optimizer, private, (x, y), epochs=5)
    torch.save(private.state_dict(), tmp_path / "private.pt")
    saved = torch.load(tmp_path / "private.pt", weights_only=True)
    copied, _, again = start()
    copied.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    assert again.num_steps == 5
    assert again.epsilon(1e-5) == private.epsilon(1e-5)
    assert torch.equal(again._basis.directions(), private._basis.directions())
    with pytest.raises(ValueError, match="another basis"):
        start(rank=3)[2].load_state_dict(saved)


def test_what_is_behind_the_filter_sees_the_noised_gradient():
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = dome.privacy.Clip(0.01)
    train(model, optimizer, attach(model, optimizer, after=clip), samples(5))
    assert flat_grad(model).norm() == pytest.approx(0.01)


def test_detached_training_is_plain_again():
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer) as private:
        assert private.is_attached
    x, y = samples(5)
    cross_entropy(model(x), y).backward()
    before = flat_grad(model)
    optimizer.step()
    assert torch.equal(flat_grad(model), before)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_hands_its_collation_and_workers_over(num_workers):
    def collate(batch):
        x, y = zip(*batch, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    model, optimizer, private = attached(sample_rate=0.2)
    dataset = TensorDataset(*samples(10))
    given = DataLoader(dataset, collate_fn=collate, num_workers=num_workers)
    loader = private.loader(given)
    assert len(loader) == 5
    for batch in loader:
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
    assert private.num_steps == 5


def test_every_sample_is_drawn_by_itself_with_the_same_probability():
    sampler = PoissonSampler(50, 0.3, Randomness())
    drawn = torch.zeros(900, 50)
    for i in range(300):
        for j, indices in enumerate(sampler):
            drawn[3 * i + j, indices] = 1
    assert i == 299
    # 900 batches: one sample's share is known to 0.015, five times of which pass.
    assert (drawn.mean(dim=0) - 0.3).abs().max() < 0.075
    pairs = torch.corrcoef(drawn.T).fill_diagonal_(0)
    assert pairs.abs().max() < 5.5 / math.sqrt(900)


class FirstAxes:
    """The first K parameters, which no sample has chosen: a basis in twenty lines."""

    filters_first, moment_basis = True, None

    def __init__(self, given):
        self._basis = torch.eye(given.layout.dim, dtype=given.layout.dtype)
        self._basis = self._basis[:, : given.rank]

    def prepare(self):
        pass

    def directions(self):
        return self._basis

    def learn(self, release):
        pass

    def state_dict(self):
        return {"basis": self._basis.clone()}

    def load_state_dict(self, state):
        self._basis = state["basis"].clone()


def test_a_basis_is_one_new_class_and_one_line(monkeypatch):
    monkeypatch.setitem(BASES, "axes", FirstAxes)  # the line
    model, optimizer, private = attached("axes", rank=5, noise_multiplier=SILENT)
    before = model[0].weight.detach().flatten().clone()
    train(model, optimizer, private, samples(20))
    moved = model[0].weight.detach().flatten() - before
    # What is left along them is the noise, of which a step has hardly any.
    assert moved[:5].abs().max() < 1e-8 < 1e-4 < moved[5:].abs().max()


def test_activation_checkpointing_changes_no_private_step():
    def checkpointed(model):
        forward = model.forward
        model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)

    weights = []
    for change in (lambda model: None, checkpointed):
        model, optimizer, private = attached("released", noise_multiplier=SILENT)
        change(model)
        train(model, optimizer, private, samples(9), epochs=4)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    # The noise is seeded, and too small to hide a difference.
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
