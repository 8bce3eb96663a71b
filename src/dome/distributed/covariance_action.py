"""Samples that stay where they are: workers send their covariance action instead.

Letters: D parameters, K tracked columns, P workers, B_p samples of a worker. Instead of
its samples, B_p D numbers, each worker sends its part of the action Hᵀ V (D, K), of
which every worker gets the rows of its shard, and gets the new U back: 2 D K numbers,
and 2 D for the mean and the gradient. For that, every worker keeps a whole copy of U,
and has a part of the action beside it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dome.distributed.resharding import Resharding
from dome.distributed.workers import Workers
from dome.numerics import passes
from dome.numerics.products import Combination, Products, Rows, questions
from dome.numerics.shard import Shard
from dome.numerics.together import Steps, Sum


class WholeBasis:
    """A copy of all D rows of U, kept from one step to the next.

    Args:
        resharding: Between whole and split.
    """

    def __init__(self, resharding: Resharding) -> None:
        self._resharding = resharding
        self._whole: Tensor | None = None

    def of(self, S: Tensor, Q: Tensor | None) -> Tensor:
        """U = S Q (D, K), from the rows of all workers if there is no copy."""
        if self._whole is None:
            rows = S if Q is None else S @ Q.to(S.dtype)
            self._whole = self._resharding.whole(rows, "samples")
        return self._whole

    def forget(self) -> None:
        """Drop the copy: the basis has changed."""
        self._whole = None


class ActionSamples:
    """The samples of all workers, ``scale * rows`` of this one, as a tracker sees them.

    Args:
        rows: This worker's, shape (B_p, D).
        counts: B_p of every worker.
        scales: The factor of every worker.
        whole: The copy of U.
        resharding: Between whole and split.
        workers: The P workers.
    """

    def __init__(
        self,
        rows: Tensor,
        counts: Sequence[int],
        scales: Sequence[float],
        whole: WholeBasis,
        resharding: Resharding,
        workers: Workers,
    ) -> None:
        self._rows, self._counts, self._scales = rows, counts, scales
        self._whole, self._resharding, self._workers = whole, resharding, workers
        self._scale = scales[workers.rank]
        self._action = rows[:0]

    def __len__(self) -> int:
        return sum(self._counts)

    def products(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Products]:
        """V and ‖g_b‖² of all workers' samples, and Vᵀ H Hᵀ V from Hᵀ V."""
        measured = self._measured(S, Q)
        GU, squares = measured[:, :-1], measured[:, -1]
        total = self._scale * self._rows.sum(dim=0) / len(self)
        mean = self._resharding.scattered(total, "samples")
        V, dtype = GU - GU.mean(dim=0), passes.compute_dtype(S.dtype)
        start = sum(self._counts[: self._workers.rank])
        own = (self._scale * V[start : start + len(self._rows)]).to(dtype)
        action = self._rows.to(dtype).T @ own
        self._action = self._resharding.scattered(action, "samples").T
        VHHV = passes.multiply(self._action, self._action.T)
        mean2 = torch.linalg.vecdot(mean, mean).double()
        VHHV, mu2 = yield Sum(shard.total, (VHHV, mean2))
        return Products(
            V=V,
            m=GU.mean(dim=0),
            # Of ‖g_b‖² = ‖h_b‖² + 2 h_bᵀμ + ‖μ‖² only sums are used: h_bᵀμ sums to 0.
            squares=squares - mu2,
            Hmu=torch.zeros_like(squares),
            mu2=mu2,
            VHHV=VHHV,
        )

    def questions(self, seen: Products) -> tuple[Tensor, Tensor, Tensor]:
        """Is it finite; is it constant up to rounding; does it want more care?"""
        return questions(seen, self._rows.dtype)

    def careful(self, shard: Shard) -> Steps[Rows]:
        """The samples themselves, moved: they can be centred before anything else."""
        self._whole.forget()
        rows = self._resharding.samples(self._rows, self._counts, self._scales)
        return (yield from Rows(rows).careful(shard))

    def combinations(self, V: Tensor, X: Tensor) -> Iterator[Combination]:
        """Hᵀ V X, of which Hᵀ V is here already."""
        del V
        yield Combination(slice(None), self._action, X)

    def coordinates(self, S: Tensor, Q: Tensor | None, shard: Shard) -> Steps[Tensor]:
        """G U (B, K) with a U that has changed."""
        yield from ()
        del shard
        self._whole.forget()
        return self._measured(S, Q)[:, :-1]

    def _measured(self, S: Tensor, Q: Tensor | None) -> Tensor:
        """G U and ‖g_b‖² of all workers' samples, float64, shape (B, K + 1)."""
        own = self._scale * passes.multiply(self._rows, self._whole.of(S, Q))
        squares = self._scale**2 * passes.squared_norms(self._rows)
        both = torch.cat([own, squares[:, None]], dim=1)
        return self._workers.collect(both, self._counts, "sums")


def is_cheaper(num_columns: int, num_samples: int, num_workers: int) -> bool:
    """Whether actions send less than the samples of all workers would be."""
    # K columns there and K back, and two for the mean and the gradient, which samples
    # would carry along.
    return num_samples > (2 * num_columns + 2) * num_workers
