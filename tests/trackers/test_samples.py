import pytest
import torch

from dome.trackers import linalg
from dome.trackers.basis import FactoredBasis
from dome.trackers.linalg import Shard
from dome.trackers.parts import parts_of
from dome.trackers.samples import Samples


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(linalg, "CPU_NUMBERS", 77)


def orthonormal(rng, dim, rank, dtype=torch.float64):
    Q, _ = torch.linalg.qr(torch.randn(dim, rank, generator=rng, dtype=torch.float64))
    U = FactoredBasis(Shard.whole(dim), rank, dtype, None, seed=0)
    U.write_(Q)
    return U


def careful(samples, dtype=torch.float64):
    return samples.carefully(Shard.whole(samples.parts[0].rows.shape[1]), dtype)


def looked_at(samples, U, pairwise=True):
    sums = samples.look(U, pairwise=pairwise)
    return samples.seen(sums if pairwise else sums | samples.act(U, sums))


@pytest.mark.parametrize("pairwise", [True, False], ids=["pairwise", "in two steps"])
@pytest.mark.parametrize("mean", [2.0, 1e6])
@pytest.mark.parametrize("with_care", [False, True])
def test_products_are_those_of_the_centred_samples(pairwise, mean, with_care, rng):
    basis, X = orthonormal(rng, 90, 5), torch.randn(5, 5, generator=rng).double()
    U = basis.matrix
    G = torch.randn(12, 90, generator=rng, dtype=torch.float64) + mean
    samples = Samples(G / 3, 3.0)
    if with_care:
        samples = careful(samples)
    elif mean > 1e3:
        return  # that is what care is for
    mu, H = G.mean(dim=0), G - G.mean(dim=0)
    V = H @ U
    seen = looked_at(samples, basis, pairwise)
    # A mean of 1e6 leaves ten digits of what the samples' own rounding keeps.
    close = {"rtol": 1e-7, "atol": 1e-7 * mean**0.5}
    torch.testing.assert_close(seen.V, V, **close)
    torch.testing.assert_close(seen.m, mu @ U, **close)
    torch.testing.assert_close(seen.Hmu, H @ mu, rtol=1e-7, atol=1e-4 * mean)
    torch.testing.assert_close(seen.mu2, mu.square().sum(), **close)
    torch.testing.assert_close(seen.HHV, H @ (H.T @ V), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(seen.VHHV, V.T @ (H @ (H.T @ V)), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(seen.energy, H.square().sum(), **close)
    torch.testing.assert_close(seen.totals, G.square().sum(dim=1), rtol=1e-7, atol=1e-7)
    wide, small = samples.combination(seen.V, X)
    torch.testing.assert_close(
        wide[0].rows.T @ small, H.T @ V @ X, rtol=1e-6, atol=1e-4
    )
    torch.testing.assert_close(samples.coordinates(basis), G @ U)


def test_what_samples_have_outside_a_basis_keeps_its_digits_where_little_is(rng):
    U = orthonormal(rng, 40, 5, torch.float32)
    inside = 1000 * torch.randn(6, 5, generator=rng) @ U.matrix.T
    G = inside + 0.01 * torch.randn(6, 40, generator=rng)
    exact, basis = G.double() - G.double().mean(dim=0), U.matrix.double()
    V = looked_at(Samples(G), U).V
    correction, inner = U.outside(parts_of(G), V)
    rest = exact - (V + correction) @ basis.T
    # Float32 rounds samples of length 2,000 to 1e-4, a fiftieth of what is outside.
    torch.testing.assert_close(
        inner - correction @ correction.T, rest @ rest.T, rtol=0.1, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda G: G, (True, False, False)),
        (lambda G: G + 100, (True, False, True)),
        (lambda G: G * 0 + 1, (True, True, True)),
        (lambda G: G * 0, (True, True, True)),
        (lambda G: G * 1e-25, (True, None, True)),
        (lambda G: G * 1e15, (True, False, True)),
        (lambda G: G.index_fill(0, torch.tensor([1]), torch.nan), (False, None, True)),
    ],
    ids=["plain", "long mean", "constant", "zero", "tiny", "huge", "not finite"],
)
def test_what_is_seen_tells_what_a_batch_needs(change, expected, rng):
    G = change(torch.randn(6, 40, generator=rng))
    seen = looked_at(Samples(G), orthonormal(rng, 40, 5, torch.float32))
    answers = seen.is_finite, seen.is_constant, seen.wants_care
    # Without care, numbers that underflow look like zero.
    pairs = zip(answers, expected, strict=True)
    assert all(answer == right for answer, right in pairs if right is not None)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_with_care_samples_of_any_size_keep_their_digits(size, rng):
    G = torch.randn(6, 40, generator=rng, dtype=torch.float64)
    U = orthonormal(rng, 40, 5)
    exact, close = looked_at(Samples(G), U), {"rtol": 1e-4, "atol": 1e-4}
    low = FactoredBasis(Shard.whole(40), 5, torch.float32, None, seed=0)
    low.write_(U.matrix)
    seen = looked_at(careful(Samples((G * size).float()), torch.float32), low)
    # Float32 rounds each of 40 products to 6e-8.
    torch.testing.assert_close(seen.V / size, exact.V, **close)
    torch.testing.assert_close(seen.totals / size / size, exact.totals, **close)
    assert seen.is_finite
    assert not seen.is_constant


def test_the_samples_of_a_caller_stay_as_they_are_with_care(rng):
    G = 1e-20 * torch.randn(6, 40, generator=rng) + 1.0
    before = G.clone()
    careful(Samples(G), torch.float32)
    assert torch.equal(G, before)
