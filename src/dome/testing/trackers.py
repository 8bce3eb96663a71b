"""The contract of a tracker.

Letters: B samples, D parameters, K directions. ``make`` is a function (dim, rank) ->
tracker, as in ``dome.attach(..., tracker=make)``.
"""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dome.filter import GradientFilter
from dome.testing.judge import must, must_equal, reloaded, run_all
from dome.trackers import Tracker
from dome.trackers.protocol import missing_members

Make = Callable[[int, int], Tracker]
DIM, RANK, NUM_SAMPLES = 12, 3, 6
NOT_A_NUMBER = float("nan")


def it_has_every_member(make: Make) -> None:
    """All that ``dome.trackers.Tracker`` names is there."""
    missing = missing_members(make(DIM, RANK))
    must(not missing, f"the tracker lacks {missing}")


def nothing_is_removed_before_the_first_update(make: Make) -> None:
    """No direction is determined, and gradients are left as they are."""
    tracker = make(DIM, RANK)
    g = _vector(tracker)
    must(tracker.effective_rank == 0, f"effective_rank is {tracker.effective_rank}")
    must_equal(tracker.project_out(g), g, "project_out changes a gradient")


def the_basis_is_orthonormal_where_it_is_not_zero(make: Make) -> None:
    """(D, k) with orthonormal columns; those that are not known yet may be zero."""
    tracker = make(DIM, RANK)
    for G in _stream(tracker):
        tracker.update(G)
        U = tracker.basis
        must(U.ndim == 2 and len(U) == DIM, f"basis has shape {tuple(U.shape)}")
        U = U[:, U.any(dim=0)].double()
        error = (U.T @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max()
        # Half of the digits: a basis that is updated for ever loses some of them.
        limit = torch.finfo(tracker.basis.dtype).eps ** 0.5
        must(bool(error < limit), f"the largest entry of |UᵀU − I| is {error:.1e}")
        known = tracker.effective_rank
        must(0 < known <= DIM, f"effective_rank is {known} after an update")


def eigenvalues_are_variances(make: Make) -> None:
    """One for each column of the basis, finite and not negative."""
    tracker = make(DIM, RANK)
    for G in _stream(tracker):
        tracker.update(G)
    values, num = tracker.eigenvalues, tracker.basis.shape[1]
    must(values.shape == (num,), f"eigenvalues: {tuple(values.shape)}, not ({num},)")
    must(bool(values.isfinite().all() and (values >= 0).all()), f"they are {values}")


def project_out_is_the_projection(make: Make) -> None:
    """g − strength · U Uᵀ g in the gradient's own precision, g left as it is."""
    tracker = _updated(make)
    U = tracker.basis.double()
    for strength, dtype in ((1.0, torch.float64), (0.5, _dtype(tracker))):
        g = _vector(tracker).to(dtype)
        before = g.clone()
        out = tracker.project_out(g, strength)
        must(out.dtype == g.dtype and out.shape == g.shape, f"it returns {out}")
        must_equal(g, before, "project_out changes its argument")
        expected = g.double() - strength * U @ (U.T @ g.double())
        close = torch.finfo(tracker.basis.dtype).eps ** 0.5
        torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


def samples_are_left_as_they_are(make: Make) -> None:
    """``update`` does not write to its argument: others may use the rows, too."""
    tracker = make(DIM, RANK)
    for G in _stream(tracker):
        before = G.clone()
        tracker.update(G)
        must_equal(G, before, "update changes the samples")


def scale_multiplies_the_samples(make: Make) -> None:
    """``update(G, scale)`` is ``update(scale * G)``."""
    told, scaled = make(DIM, RANK), make(DIM, RANK)
    for G in _stream(told):
        told.update(G, 4.0)  # a power of two, which does not round
        scaled.update(4.0 * G)
    for name in ("basis", "eigenvalues"):
        close = torch.finfo(told.basis.dtype).eps ** 0.5
        one, other = getattr(told, name), getattr(scaled, name)
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def bad_batches_do_no_harm(make: Make) -> None:
    """After zeros, or numbers that are not finite, the basis is finite still."""
    for value in (0.0, NOT_A_NUMBER):
        tracker = _updated(make)
        g = _vector(tracker)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may say so
            tracker.update(torch.full((NUM_SAMPLES, DIM), value, dtype=g.dtype))
        out = tracker.project_out(g)
        must(bool(out.isfinite().all()), f"after a batch of {value} it removes {out}")
        tracker.update(next(_stream(tracker)))  # and it goes on


def a_state_resumes_bit_for_bit(make: Make) -> None:
    """``state_dict`` is a copy of all that counts, and survives being saved."""
    straight, resumed = make(DIM, RANK), make(DIM, RANK)
    batches = list(_stream(straight))
    straight.update(batches[0])
    state = straight.state_dict()
    saved, basis = reloaded(state), straight.basis.clone()
    straight.update(batches[1])
    must_equal(state, saved, "a later update changes the state that was given away")
    resumed.load_state_dict(saved)
    must_equal(resumed.basis, basis, "the loaded basis differs")
    resumed.update(batches[1])
    must_equal(resumed.basis, straight.basis, "the resumed basis differs")
    must_equal(resumed.eigenvalues, straight.eigenvalues, "its eigenvalues differ")


def a_filter_trains_with_it(make: Make) -> None:
    """In both layouts, in float64: gradients, stats, a run that resumes bit for bit."""
    for layout in ("global", "layerwise"):
        model, grad_filter = _filtered(make, layout)
        _step(model, grad_filter, 0)
        saved = reloaded(grad_filter.state_dict())
        straight = _step(model, grad_filter, 1)
        kept = grad_filter.stats.kept_norm
        must(0 <= kept <= 1.01, f"stats.kept_norm is {kept}")
        model, grad_filter = _filtered(make, layout)
        grad_filter.load_state_dict(saved)
        must_equal(_step(model, grad_filter, 1), straight, "a resumed run differs")


TRACKER_CHECKS = (
    it_has_every_member,
    nothing_is_removed_before_the_first_update,
    the_basis_is_orthonormal_where_it_is_not_zero,
    eigenvalues_are_variances,
    project_out_is_the_projection,
    samples_are_left_as_they_are,
    scale_multiplies_the_samples,
    bad_batches_do_no_harm,
    a_state_resumes_bit_for_bit,
    a_filter_trains_with_it,
)


def check_tracker(make: Make) -> None:
    """Raise ``AssertionError`` unless the filter can rely on a tracker.

    Args:
        make: A function (dim, rank) -> tracker, as for ``dome.attach(tracker=make)``.
    """
    run_all(TRACKER_CHECKS, make)


def _dtype(tracker: Tracker) -> torch.dtype:
    """Of samples and gradients: that of the basis, or float32 where it is shorter."""
    return torch.promote_types(tracker.basis.dtype, torch.float32)


def _stream(tracker: Tracker) -> Iterator[Tensor]:
    """Batches (B, D) with a mean, longer in some directions than in others."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.linspace(3, 0.3, DIM, dtype=torch.float64)
    for _ in range(4):
        G = torch.randn(NUM_SAMPLES, DIM, generator=rng, dtype=torch.float64)
        yield (lengths * G + 0.5).to(_dtype(tracker))


def _vector(tracker: Tracker) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(DIM, generator=rng, dtype=torch.float64).to(_dtype(tracker))


def _updated(make: Make) -> Tracker:
    tracker = make(DIM, RANK)
    for G in _stream(tracker):
        tracker.update(G)
    return tracker


def _filtered(make: Make, layout: str) -> tuple[nn.Module, GradientFilter]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model.double()
    return model, GradientFilter(model, RANK, tracker=make, layout=layout)


def _step(model: nn.Module, grad_filter: GradientFilter, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_SAMPLES, 4, generator=rng, dtype=torch.float64)
    model.zero_grad()
    model(x).square().sum(dim=1).mean().backward()
    grad_filter.step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    must(all(bool(g.isfinite().all()) for g in grads), "a gradient is not finite")
    return grads
