import pytest
import torch
from compression_twins import hadamard_matrix, hadamard_sketch

from dome.compression import GaussianSketch, HadamardSketch, hadamard
from dome.compression.noise import (
    DEFAULT_SEED,
    generator_of,
    random_signs,
    random_subset,
)


def explicit(dim, size, step):
    blocks = hadamard.Blocks.of(dim)
    random = generator_of(DEFAULT_SEED, step)
    signs = random_signs(dim, random, torch.zeros(1))
    positions = random_subset(blocks.total, size, random)
    return hadamard_sketch(signs, positions, blocks.count, blocks.used, blocks.length)


@pytest.mark.parametrize(
    ("bits", "count"), [(0, 1), (1, 3), (3, 1), (4, 3), (5, 1), (8, 1), (9, 3)]
)
def test_the_transform_is_that_of_the_explicit_matrix(bits, count, rng):
    x = torch.randn(count, 2**bits, generator=rng, dtype=torch.float64)
    y = hadamard.transform(x)
    torch.testing.assert_close(y.view(-1, count).T, x @ hadamard_matrix(2**bits))
    torch.testing.assert_close(hadamard.transform_back(y, count), x)


@pytest.mark.parametrize(("dim", "size"), [(1, 1), (2, 1), (50, 10), (64, 64)])
def test_a_message_is_the_explicit_sketch_of_its_step(dim, size, rng):
    sketch = HadamardSketch(dim / size, value_dtype=torch.float64)
    for step in range(2):
        g = torch.randn(dim, generator=rng, dtype=torch.float64)
        R = explicit(dim, size, step)
        message = sketch.encode(g)
        torch.testing.assert_close(message.numbers[:size], R @ g)
        torch.testing.assert_close(sketch.decode(message), R.T @ (R @ g))


@pytest.mark.parametrize("dim", [40, 48, 49, 50])
def test_long_vectors_go_block_by_block(dim, rng, monkeypatch):
    monkeypatch.setattr(hadamard, "LONGEST", 16)
    sketch = HadamardSketch(dim / 10, value_dtype=torch.float64)
    g = torch.randn(dim, generator=rng, dtype=torch.float64)
    R = explicit(dim, 10, 0)
    torch.testing.assert_close(sketch(g), R.T @ (R @ g))


def test_blocks_share_the_zeros():
    assert hadamard.Blocks.of(16_384) == hadamard.Blocks(1, 16_384, 16_384)
    assert hadamard.Blocks.of(16_385) == hadamard.Blocks(2, 8_193, 16_384)
    assert hadamard.Blocks.of(78_042) == hadamard.Blocks(5, 15_609, 16_384)
    assert hadamard.Blocks.of(1) == hadamard.Blocks(1, 1, 1)


def test_the_variance_in_full_blocks_is_that_of_the_formula(rng, monkeypatch):
    monkeypatch.setattr(hadamard, "LONGEST", 16)
    g = torch.randn(42, generator=rng, dtype=torch.float64)
    sketch = HadamardSketch(5.0)
    errors = torch.stack([(sketch(g) - g).square().sum() for _ in range(500)])
    errors /= g.dot(g)
    # Five standard errors: a false alarm once in two million runs.
    bound = 5 * errors.std() / 500**0.5
    assert abs(errors.mean() - sketch.variance(42)) <= bound


@pytest.mark.parametrize("dim", [1000, 16_384, 16_385, 1_000_001])
def test_it_is_no_noisier_than_the_gaussian_sketch(dim):
    for rate in (2.0, 1000.0):
        gaussian, own = GaussianSketch(rate).variance(dim), HadamardSketch(rate)
        assert 0 < own.variance(dim) < gaussian


def test_one_large_entry_is_spread_over_its_block(rng):
    g = torch.zeros(4096)
    g[1000] = 1.0
    noise = HadamardSketch(8.0)(g) - g
    # 4096 entries of variance 8/4096: none is five times as large, save once in 1,000
    # draws, and this one is fixed by its seed.
    assert noise.abs().max() < 5 * (8 / 4096) ** 0.5
