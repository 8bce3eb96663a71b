import pytest
import torch
from models import small_classifier
from reference import gradient_covariance, projector_distance
from torch.nn.functional import cross_entropy

from dome.diagnostics import (
    batch_spectrum,
    covariance_eigenpairs,
    data_spectrum,
    effective_rank,
    eigengap,
    entropy_rank,
    knee,
    suggest_rank,
)
from dome.diagnostics.rank import rank_of

INDEX = torch.arange(1, 401, dtype=torch.float64)


def outliers_on_a_bulk(num, factor=30.0):
    values = INDEX**-0.2
    values[:num] *= factor
    return values


@pytest.mark.parametrize("as_pair", [True, False])
def test_a_data_set_has_the_spectrum_of_its_explicit_covariance(rng, as_pair):
    model = small_classifier()
    x = torch.randn(20, 8, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=rng)
    parts = list(zip(x.split(6), y.split(6), strict=True))
    data = (x, y) if as_pair else parts
    spectrum = data_spectrum(model, cross_entropy, data, batch_size=7)
    expected = torch.linalg.eigvalsh(gradient_covariance(model, cross_entropy, x, y))
    assert spectrum.num_samples == 20
    torch.testing.assert_close(spectrum.eigenvalues, expected.flip(0)[:19])
    assert spectrum.total_variance == pytest.approx(float(expected.sum()))
    assert spectrum.share(19) == pytest.approx(1)


def test_eigenpairs_of_samples_are_those_of_the_explicit_covariance(rng):
    G = torch.randn(15, 40, generator=rng, dtype=torch.float64) * INDEX[:40] ** -1.0
    values, vectors = covariance_eigenpairs(G, 4)
    exact = torch.linalg.eigh(torch.cov(G.T, correction=0))
    torch.testing.assert_close(values, exact.eigenvalues.flip(0)[:4])
    assert projector_distance(vectors, exact.eigenvectors.flip(1)[:, :4]) < 1e-10
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(4, dtype=vectors.dtype))


def test_more_directions_than_samples_have_are_refused(rng):
    G = torch.randn(5, 40, generator=rng)
    with pytest.raises(
        ValueError, match=r"between 1 and 4, .*got 5: take more samples"
    ):
        covariance_eigenpairs(G, 5)
    G[2:] = G[0]
    with pytest.raises(ValueError, match="fewer than 3 directions of variance"):
        covariance_eigenpairs(G, 3)


def test_too_many_or_broken_samples_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="not finite"):
        batch_spectrum(torch.full((4, 3), torch.nan))
    with pytest.raises(ValueError, match="at least three samples"):
        batch_spectrum(torch.ones(2, 3))
    monkeypatch.setattr("dome.diagnostics.spectrum.MOST_SAMPLES", 3)
    data = torch.ones(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"4 samples .*dome\.curvature\.Covariance"):
        data_spectrum(small_classifier(), cross_entropy, data)


@pytest.mark.parametrize("num", [3, 10, 40])
def test_outliers_of_a_made_distribution_are_marked(rng, num):
    scales = torch.ones(300, dtype=torch.float64)
    scales[:num] = 20.0
    G = torch.randn(200, 300, generator=rng, dtype=torch.float64) * scales
    spectrum = batch_spectrum(G)
    assert spectrum.num_outliers == num
    assert spectrum.outliers.sum() == num
    assert spectrum.outliers[:num].all()
    assert spectrum.eigengap.index == num


def test_noise_without_outliers_has_none(rng):
    G = torch.randn(200, 300, generator=rng, dtype=torch.float64)
    assert batch_spectrum(G).num_outliers == 0


@pytest.mark.parametrize("slope", [-0.2, -1.0, -2.0])
def test_a_power_law_has_no_knee(slope):
    assert knee(INDEX**slope) is None


@pytest.mark.parametrize("num", [1, 7, 50])
def test_the_knee_and_the_gap_are_after_the_outliers(num):
    values = outliers_on_a_bulk(num)
    assert knee(values) == num
    assert eigengap(values).index == num
    assert eigengap(values).ratio == pytest.approx(30 * ((num + 1) / num) ** 0.2)
    # The order in which a tracker has them does not matter.
    assert knee(values.flip(0)) == num


@pytest.mark.parametrize(
    ("num", "num_classes", "rank", "source"),
    [
        (9, 10, 10, "C"),
        (19, 10, 10, "C"),
        (21, 10, 21, "knee"),
        (49, 10, 49, "knee"),
        (60, 10, 100, "C^2"),
        (199, 10, 100, "C^2"),
        (60, None, 60, "knee"),
    ],
)
def test_the_suggestion_says_where_it_comes_from(num, num_classes, rank, source):
    suggested = rank_of(outliers_on_a_bulk(num), num_classes)
    assert (suggested.rank, suggested.source, suggested.knee) == (rank, source, num)
    assert str(rank) in str(suggested)
    assert "knee" in str(suggested)


@pytest.mark.parametrize(
    ("known", "num_classes", "rank", "source"),
    [(400, 10, 100, "C^2"), (60, 10, 10, "C"), (400, None, 400, "entropy rank")],
)
def test_without_a_knee_the_classes_decide(known, num_classes, rank, source):
    values = torch.ones(known)
    suggested = rank_of(values, num_classes)
    assert (suggested.rank, suggested.source) == (rank, source)
    assert suggested.knee is None
    assert "lack of a knee" in str(suggested)


def test_entropy_rank_counts_directions():
    assert entropy_rank(torch.ones(7)) == pytest.approx(7)
    assert entropy_rank(torch.tensor([5.0, 0.0, 0.0])) == pytest.approx(1)
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    # Entropy of halves and quarters: 1.5 bits.
    assert entropy_rank(8 * p) == pytest.approx(2**1.5)


def test_the_old_name_of_entropy_rank_warns(rng):
    values = torch.tensor([2.0, 1.0, 1.0])
    with pytest.deprecated_call(match="entropy_rank now"):
        assert effective_rank(values) == entropy_rank(values)
    spectrum = batch_spectrum(torch.randn(9, 4, generator=rng))
    with pytest.deprecated_call(match="entropy_rank now"):
        assert spectrum.effective_rank == spectrum.entropy_rank


def test_the_names_that_dome_suggest_replaces_warn(rng):
    values = outliers_on_a_bulk(9)
    with pytest.deprecated_call(match="suggest_rank is replaced by dome.suggest"):
        assert suggest_rank(values, 10) == rank_of(values, 10)
    spectrum = batch_spectrum(torch.randn(40, 50, generator=rng))
    with pytest.deprecated_call(match="suggested_rank is replaced by dome.suggest"):
        assert spectrum.suggested_rank().rank > 0


def test_a_spectrum_is_printed_in_a_few_lines(rng):
    scales = torch.ones(300, dtype=torch.float64)
    scales[:3] = 20.0
    spectrum = batch_spectrum(torch.randn(200, 300, generator=rng).double() * scales)
    shown = str(spectrum)
    assert len(shown.splitlines()) == 4
    assert max(map(len, shown.splitlines())) <= 80
    assert "199 eigenvalues from 200 samples" in shown
    assert f"2: {spectrum.share(2):.0%}, 5: {spectrum.share(5):.0%}" in shown
    assert "3 outliers" in shown
    assert "rank 3, the knee of the spectrum" in shown
    assert repr(spectrum) == "Spectrum(num_samples=200)"
    assert "do not differ" in str(batch_spectrum(torch.ones(5, 3)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, -0.1], "none negative"),
        ([1.0, float("nan")], "finite"),
        ([1.0, 0.0], "1 of 2 eigenvalues are positive"),
    ],
)
def test_eigenvalues_that_are_none_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        rank_of(torch.tensor(values))


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        rank_of(INDEX**-1, 1)
