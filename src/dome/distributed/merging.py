"""One basis from those of all workers: the leading part of their averaged covariance.

Shapes: worker p tracks U_p (D, K) with eigenvalues λ_p. The shared basis keeps the
leading K left singular vectors of the tall matrix

    A = [ U_1 diag(√(λ_1/P)), ..., U_P diag(√(λ_P/P)) ]        (D, P K)

whose A Aᵀ is the average of the workers' covariances. An all-to-all gives every worker
D/P rows of all U_p, AᵀA (P K, P K) is a small sum, and the result is gathered: together
the bytes of an all-reduce of one U, 2 (P − 1)/P D K numbers, and of (P K)² in float64.
"""

import torch
from torch import Tensor

from dome.distributed.split_basis import Split
from dome.distributed.workers import Workers
from dome.torch_private import own_arithmetic
from dome.trackers import Tracker
from dome.trackers.linalg import compute_dtype, gram
from dome.trackers.tracker import BasisTracker

MOST_COLUMNS = 8192  # of A: the eigenvectors of AᵀA take its cube in flops
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}  # of AᵀA, relative


def check_mergeable(tracker: Tracker, num_workers: int) -> BasisTracker:
    """Refuse trackers whose bases cannot be averaged, and too many columns."""
    if not isinstance(tracker, BasisTracker):
        raise ValueError(
            f"bases of {type(tracker).__name__} cannot be synchronised or saved: use "
            f'tracker="power" or "svd"'
        )
    width = len(tracker.column_values)
    if num_workers * width > MOST_COLUMNS:
        raise ValueError(
            f"{num_workers} workers with {width} directions each are "
            f"{num_workers * width} columns to bring together, at most {MOST_COLUMNS} "
            f"can be"
        )
    return tracker


@own_arithmetic
def merge_bases(tracker: Tracker, workers: Workers) -> None:
    """Replace the basis of every worker's tracker by that of their average.

    The average may have fewer than K directions. A power iteration then gets random
    ones, the same on all workers, and its ``effective_rank`` says so.
    """
    own = check_mergeable(tracker, workers.size)
    merged, values, C = _merged(own.columns, own.column_values, workers)
    numbers = values.new_tensor(float(own.num_updates))
    arbitrary, numbers = workers.total(own.arbitrary_in(C), numbers)
    own.become_(merged, values, arbitrary, round(float(numbers) / workers.size))


def _merged(
    U: Tensor, values: Tensor, workers: Workers
) -> tuple[Tensor, Tensor, Tensor]:
    """Leading columns (D, K), their eigenvalues (K,), and this worker's part in them.

    The last, C (K, K), says that the new basis is the sum of U_p C_p over workers.
    """
    P, (D, K) = workers.size, U.shape
    split, dtype = Split(D, workers), compute_dtype(U.dtype)
    own, parts = split.num_held, [U[part] for part in split.ranges]
    rows = workers.exchange(parts, [own * K] * P, "basis").view(P, own, K)
    scales = workers.gather(values, "basis").view(P, K).div(P).sqrt()
    A = (rows.to(dtype) * scales[:, None].to(dtype)).transpose(0, 1).reshape(own, P * K)
    (AA,) = workers.total(gram(A))
    theta, X = torch.linalg.eigh(AA)
    theta, X = theta.flip(0)[:K], X.flip(1)[:, :K]
    theta = torch.where(theta > ROUNDING[dtype] * theta[0], theta, 0.0)
    # A zero column stays zero: nothing determines it.
    X = X * torch.where(theta > 0, theta, 1.0).rsqrt() * (theta > 0)
    lengths = [part.stop - part.start for part in split.ranges]
    whole = workers.collect((A @ X.to(dtype)).to(U.dtype), lengths, "basis")
    mine = X.view(P, K, K)[workers.rank]
    return whole, theta, scales[workers.rank][:, None] * mine
