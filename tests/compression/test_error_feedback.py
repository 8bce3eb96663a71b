import pytest
import torch
from compressors import COMPRESSORS

from dome.compression import (
    QSGD,
    ErrorFeedback,
    GaussianSketch,
    RandomK,
    SignSGD,
    TopK,
    sum_messages,
)

AROUND = pytest.mark.parametrize(
    "name", [name for name in COMPRESSORS if "error feedback" not in name]
)


@AROUND
def test_error_feedback_loses_nothing(name, rng):
    compressor = ErrorFeedback(COMPRESSORS[name](100))
    total = torch.zeros(100, dtype=torch.float64)
    sent = torch.zeros(100, dtype=torch.float64)
    for _ in range(5):
        called, encoded = torch.randn(2, 100, generator=rng, dtype=torch.float64)
        total += called + encoded
        sent += compressor(called)
        sent += compressor.decode(compressor.encode(encoded))
    torch.testing.assert_close(sent + compressor.error, total)


@AROUND
def test_the_memory_stays_bounded(name, rng):
    compressor = ErrorFeedback(COMPRESSORS[name](100))
    norms = []
    for _ in range(120):
        g = torch.randn(100, generator=rng)
        compressor(g)
        norms.append(float(compressor.error.norm()))
    # With ‖C(v) − v‖² ≤ (1 − δ)‖v‖² it settles; unscaled, the sketches would grow to
    # 10⁵ within 50 steps.
    assert max(norms[80:]) < 3 * max(norms[30:80])


def test_entries_that_were_left_out_come_later():
    compressor = ErrorFeedback(TopK(3.0))
    g = torch.tensor([3.0, 2.0, 1.0])
    received = [compressor(g).tolist() for _ in range(4)]
    assert received == [[3, 0, 0], [0, 4, 0], [6, 0, 0], [0, 4, 0]]


@pytest.mark.parametrize("kind", [SignSGD, lambda: TopK(10.0)])
def test_a_biased_compressor_is_used_as_it_is(kind, rng):
    g = torch.randn(50, generator=rng)
    assert torch.equal(ErrorFeedback(kind())(g), kind()(g))


def test_random_k_then_sends_entries_as_they_are(rng):
    g = torch.randn(50, generator=rng)
    received = ErrorFeedback(RandomK(5.0))(g)
    assert received.count_nonzero() == 10
    torch.testing.assert_close(received[received != 0], g[received != 0])


def test_the_sum_of_messages_is_scaled_once(rng):
    g = torch.randn(2, 60, generator=rng)
    workers = [ErrorFeedback(GaussianSketch(6.0)) for _ in range(2)]
    messages = [w.encode(x) for w, x in zip(workers, g, strict=True)]
    total = workers[0].decode(sum_messages(messages))
    expected = sum(workers[0].decode(m) for m in messages)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_messages_with_and_without_feedback_are_told_apart(rng):
    g = torch.randn(50, generator=rng)
    with pytest.raises(ValueError, match="was not made by RandomK"):
        RandomK(5.0).decode(ErrorFeedback(RandomK(5.0)).encode(g))
    with pytest.raises(ValueError, match="was not made by RandomK"):
        ErrorFeedback(RandomK(5.0)).decode(RandomK(5.0).encode(g))


def test_a_refused_gradient_leaves_the_memory_alone(rng):
    compressor = ErrorFeedback(TopK(5.0))
    compressor(torch.randn(50, generator=rng))
    before = compressor.error.clone()
    with pytest.raises(ValueError, match="entry 0 of the gradient is nan"):
        compressor(torch.full((50,), torch.nan))
    assert torch.equal(compressor.error, before)


def test_a_gradient_that_is_passed_on_though_not_finite_leaves_the_memory_alone(rng):
    compressor = ErrorFeedback(GaussianSketch(5.0))
    assert compressor(torch.full((50,), torch.nan)).isnan().all()
    assert not compressor.error.any()
    compressor(torch.randn(50, generator=rng))
    before = compressor.error.clone()
    assert compressor(torch.full((50,), torch.inf)).isnan().all()
    assert torch.equal(compressor.error, before)


def test_a_gradient_of_another_length_is_refused(rng):
    compressor = ErrorFeedback(TopK(5.0))
    compressor(torch.randn(50, generator=rng))
    with pytest.raises(ValueError, match="holds 50 numbers, the gradient has 60"):
        compressor(torch.randn(60, generator=rng))


@pytest.mark.parametrize("wrong", [TopK, 100, None])
def test_what_is_no_compressor_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=r"needs a compressor.*TopK\(rate=100\)"):
        ErrorFeedback(wrong)


def test_feedback_around_feedback_is_refused():
    with pytest.raises(ValueError, match="has error feedback already"):
        ErrorFeedback(ErrorFeedback(SignSGD()))


def test_the_worker_is_told_to_a_compressor_with_noise_of_its_own(rng):
    g = torch.randn(50, generator=rng)
    one, other = ErrorFeedback(QSGD(1)), ErrorFeedback(QSGD(1))
    other.set_worker(1)
    assert not torch.equal(one(g), other(g))
    ErrorFeedback(TopK(2.0)).set_worker(1)


def test_signs_leave_a_valley_only_with_feedback():
    # Karimireddy et al.: |x − y| hides ε|x + y| from the signs.
    def sum_at_the_end(compress):
        p = torch.tensor([1.0, 0.97])
        for _ in range(250):
            along, across = p.sum().sign(), (p[0] - p[1]).sign()
            g = 0.5 * along * torch.ones(2) + across * torch.tensor([1.0, -1.0])
            p = p - 0.04 * compress(g)
        return abs(float(p.sum()))

    assert sum_at_the_end(ErrorFeedback(SignSGD())) < 0.1
    assert sum_at_the_end(SignSGD()) > 0.9
