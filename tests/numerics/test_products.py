import pytest
import torch

from dome.numerics.products import Rows, questions
from dome.numerics.shard import Shard
from dome.numerics.together import together


def orthonormal(rng, dim, rank):
    Q, _ = torch.linalg.qr(torch.randn(dim, rank, generator=rng, dtype=torch.float64))
    return Q


def run(steps):
    return together([steps])[0]


def careful(samples):
    return run(samples.careful(Shard.whole(samples.rows.shape[1])))


@pytest.mark.parametrize("num_samples", [6, 30], ids=["pairwise", "in two steps"])
@pytest.mark.parametrize("mean", [2.0, 1e6])
@pytest.mark.parametrize("with_care", [False, True])
def test_products_are_those_of_the_centred_samples(num_samples, mean, with_care, rng):
    S, Q = orthonormal(rng, 90, 5), torch.randn(5, 5, generator=rng).double()
    U = S @ Q
    G = torch.randn(num_samples, 90, generator=rng, dtype=torch.float64) + mean
    samples = Rows(G / 3, 3.0)
    if with_care:
        samples = careful(samples)
    elif mean > 1e3:
        return  # that is what care is for
    mu, H = G.mean(dim=0), G - G.mean(dim=0)
    V = H @ U
    seen = run(samples.products(S, Q, Shard.whole(90)))
    # A mean of 1e6 leaves ten digits of what the samples' own rounding keeps.
    close = {"rtol": 1e-7, "atol": 1e-7 * mean**0.5}
    torch.testing.assert_close(seen.V, V, **close)
    torch.testing.assert_close(seen.m, mu @ U, **close)
    torch.testing.assert_close(seen.squares, H.square().sum(dim=1), **close)
    torch.testing.assert_close(seen.Hmu, H @ mu, rtol=1e-7, atol=1e-4 * mean)
    torch.testing.assert_close(seen.mu2, mu.square().sum(), **close)
    torch.testing.assert_close(seen.HHV, H @ (H.T @ V), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(seen.VHHV, V.T @ (H @ (H.T @ V)), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(seen.energy, H.square().sum(), **close)
    norms = G.square().sum(dim=1)
    torch.testing.assert_close(seen.sample_norms_squared, norms, rtol=1e-7, atol=1e-7)
    ((columns, wide, small, prepare),) = samples.combinations(seen.V, Q)
    assert columns == slice(None)
    product = prepare(wide, 0, torch.float64).T @ small
    torch.testing.assert_close(product, H.T @ V @ Q, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(run(samples.coordinates(S, Q, Shard.whole(90))), G @ U)


def test_what_samples_have_outside_a_basis_keeps_its_digits_where_little_is(rng):
    U = orthonormal(rng, 40, 5).float()
    inside = 1000 * torch.randn(6, 5, generator=rng) @ U.T
    G = inside + 0.01 * torch.randn(6, 40, generator=rng)
    exact, basis = G.double() - G.double().mean(dim=0), U.double()
    samples, shard = Rows(G), Shard.whole(40)
    V = run(samples.products_without_action(U, None, shard)).V
    correction, inner = run(samples.outside(U, None, V, shard))
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
        (lambda G: G * 1e-25, (True, False, True)),
        (lambda G: G * 1e15, (True, False, True)),
        (lambda G: G.index_fill(0, torch.tensor([1]), torch.nan), (False, None, True)),
    ],
    ids=["plain", "long mean", "constant", "zero", "tiny", "huge", "not finite"],
)
def test_the_questions_know_what_a_batch_needs(change, expected, rng):
    G = change(torch.randn(6, 40, generator=rng))
    U = orthonormal(rng, 40, 5).float()
    seen = run(Rows(G).products(U, None, Shard.whole(40)))
    answers = questions(seen, torch.float32)
    for answer, right in zip(answers, expected, strict=True):
        # Numbers that underflow look like zero before they are looked at with care.
        if right is not None and not (right is False and float(seen.energy) == 0):
            assert bool(answer) == right


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_with_care_samples_of_any_size_keep_their_digits(size, rng):
    G = torch.randn(6, 40, generator=rng, dtype=torch.float64)
    U = orthonormal(rng, 40, 5)
    exact = run(Rows(G).products(U, None, Shard.whole(40)))
    samples = careful(Rows((G * size).float()))
    seen = run(samples.products(U.float(), None, Shard.whole(40)))
    # Float32 rounds each of 40 products to 6e-8.
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(seen.V / size, exact.V, **close)
    torch.testing.assert_close(seen.squares / size / size, exact.squares, **close)
    finite, constant, care = samples.questions(seen)
    assert (bool(finite), bool(constant), bool(care)) == (True, False, False)
