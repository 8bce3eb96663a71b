"""The twins are slow and literal, but for what is tested here."""

import pytest
import torch
from reference import projector, projector_distance


@pytest.mark.parametrize(("dim", "rank"), [(50, 5), (20, 15), (8, 8), (30, 1)])
def test_the_distance_of_projectors_is_that_of_the_explicit_matrices(dim, rank, rng):
    U = torch.randn(dim, rank, generator=rng, dtype=torch.float64)
    W = U + 0.01 * torch.randn(dim, rank, generator=rng, dtype=torch.float64)
    columns = torch.linalg.qr(U)[0], torch.linalg.qr(W)[0]
    for a, b in [columns, (U, W), (columns[0], W)]:
        explicit = torch.linalg.matrix_norm(projector(a) - projector(b), ord=2)
        torch.testing.assert_close(projector_distance(a, b), explicit)
