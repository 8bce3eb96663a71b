import pytest
import torch
from compression_twins import integers_in_planes, qsgd

from dome.compression import QSGD
from dome.compression.message import FRONT_BYTES
from dome.compression.noise import DEFAULT_SEED, generator_of


@pytest.mark.parametrize(
    ("dim", "num_levels", "bucket_size"),
    [(1, 7, 512), (50, 1, 16), (50, 2, 1), (50, 127, 512), (48, 7, 16)],
)
def test_levels_are_those_of_the_entry_by_entry_loop(dim, num_levels, bucket_size, rng):
    g = torch.randn(dim, generator=rng, dtype=torch.float64)
    g[dim // 2] = 0.0
    compressor = QSGD(num_levels, bucket_size=bucket_size)
    uniforms = torch.empty(-(-dim // bucket_size) * bucket_size, dtype=torch.float64)
    uniforms.uniform_(generator=generator_of(DEFAULT_SEED, 0))
    expected = qsgd(g, num_levels, bucket_size, uniforms)
    # The norms travel as float32.
    torch.testing.assert_close(compressor(g), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("num_levels", "width"), [(1, 2), (2, 3), (3, 3), (7, 4), (15, 5), (127, 8)]
)
def test_a_level_takes_the_fewest_bits(num_levels, width):
    g = torch.ones(1000)
    message = QSGD(num_levels, bucket_size=100).encode(g)
    assert message.num_bits == 8 * (FRONT_BYTES + 10 * 4 + 125 * width)
    levels = integers_in_planes(message.body[40:], 1000, width)
    assert max(levels) <= 2 * num_levels


def test_many_draws_have_the_distribution_of_the_two_next_levels():
    stats = pytest.importorskip("scipy.stats")
    bucket = torch.tensor([0.3, -0.45, 0.6, 0.0], dtype=torch.float64)
    bucket[3] = (1 - bucket.square().sum()).sqrt()  # norm 1
    num_draws = 20_000
    c = QSGD(3, bucket_size=4)(bucket.repeat(num_draws)).view(num_draws, 4)
    for x, column in zip(bucket.tolist(), c.T, strict=True):
        low = int(3 * abs(x))
        up = int((column.abs() > (low + 0.5) / 3).sum())
        result = stats.binomtest(up, num_draws, 3 * abs(x) - low)
        assert result.pvalue > 2.5e-7  # four of them: one false alarm in a million
        assert ((column.sign() == torch.tensor(x).sign()) | (column == 0)).all()


def test_an_entry_alone_in_its_bucket_arrives_exactly(rng):
    g = torch.randn(100, generator=rng)
    torch.testing.assert_close(QSGD(3, bucket_size=1)(g), g)


def test_workers_round_differently_and_their_mean_is_nearer(rng):
    g = torch.randn(10_000, generator=rng)
    workers = [QSGD(1) for _ in range(8)]
    for index, worker in enumerate(workers):
        worker.set_worker(index)
    received = [worker(g) for worker in workers]
    single = (received[0] - g).norm()
    mean = (sum(received) / 8 - g).norm()
    # Independent errors: their mean is √8 times shorter, here within a tenth.
    assert float(mean / single) == pytest.approx(8**-0.5, rel=0.1)


@pytest.mark.parametrize("num_levels", [0, -1, 128])
def test_levels_that_fit_no_byte_are_refused(num_levels):
    with pytest.raises(ValueError, match=f"between 1 and 127, got {num_levels}"):
        QSGD(num_levels)


def test_an_empty_bucket_is_refused():
    with pytest.raises(ValueError, match="bucket_size must be at least 1, got 0"):
        QSGD(bucket_size=0)


@pytest.mark.parametrize("num_levels", [1, 127])
def test_messages_and_calls_agree_at_any_width(num_levels, rng):
    g = torch.randn(1000, generator=rng)
    one, other = QSGD(num_levels), QSGD(num_levels)
    assert torch.equal(one(g), other.decode(other.encode(g)))
