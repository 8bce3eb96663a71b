"""One basis from those of all workers: the leading part of their averaged covariance.

Shapes: worker p tracks U_p (D, W) with eigenvalues λ_p. The shared basis keeps the
leading W left singular vectors of the tall matrix

    M = [ U_1 diag(√(λ_1/P)), ..., U_P diag(√(λ_P/P)) ]        (D, P W)

whose M Mᵀ is the average of the workers' covariances. An all-to-all gives every worker
D/P rows of all U_p, M'M (P W, P W) is a small sum, and the result is gathered: together
the bytes of an all-reduce of one U, 2 (P − 1)/P D W numbers, and of (P W)² in float64.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dome.distributed.split import Split
from dome.distributed.workers import Workers
from dome.numerics.linalg import compute_dtype, gram
from dome.numerics.orthonormal import orthonormalize_
from dome.trackers import Tracker

VALUES = {"norms", "values"}  # what trackers call their eigenvalues in a state
MOST_COLUMNS = 8192  # of M: the eigenvectors of M'M take its cube in flops
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}  # of M'M, relative


def check_shareable(tracker: Tracker, num_workers: int) -> None:
    """Refuse trackers whose bases cannot be averaged, and too many columns."""
    state = tracker.state_dict()
    if "basis" not in state or not VALUES & state.keys():
        raise ValueError(
            f"bases of {type(tracker).__name__} cannot be synchronised or saved: use "
            f'tracker="power" or "svd"'
        )
    width = state["basis"].shape[1]
    if num_workers * width > MOST_COLUMNS:
        raise ValueError(
            f"{num_workers} workers with {width} directions each are "
            f"{num_workers * width} columns to bring together, at most {MOST_COLUMNS} "
            f"can be"
        )


@torch.no_grad()
def share_basis(tracker: Tracker, workers: Workers) -> None:
    """Replace the basis of every worker's tracker by that of their average.

    The average may have fewer than W directions. A power iteration then gets random
    ones, the same on all workers, and its ``effective_rank`` says so.
    """
    check_shareable(tracker, workers.size)
    state = tracker.state_dict()
    (key,) = VALUES & state.keys()
    merged, theta, mix = _merged(_columns(state), state[key], workers)
    numbers = state["num_updates"].to(theta)
    if key == "norms":
        owed, numbers = workers.total(mix.T @ state["arbitrary"] @ mix, numbers)
        state["arbitrary"] = owed + torch.diag((theta <= 0).to(owed.dtype))
    else:
        (numbers,) = workers.total(numbers)
        state["doubt"] = torch.zeros_like(state["doubt"])
    state["num_updates"] = (numbers / workers.size).round().long().cpu()
    _orthonormalize_(merged, theta, fill=key == "norms", seed=int(numbers))
    state |= {"basis": merged, key: theta, "mix": state["mix"][:0]}
    if "leading" in state:
        # The columns are sorted now: those that lead are the first ones.
        eye = torch.eye(len(theta), dtype=torch.float64, device=theta.device)
        num = state["leading"].shape[1]
        state |= {"leading": eye[:, :num], "leading_eigenvalues": theta[:num]}
    tracker.load_state_dict(state)


def _columns(state: Mapping[str, Tensor]) -> Tensor:
    """All the columns of a tracker, shape (D, W)."""
    S, Q = state["basis"], state["mix"]
    return S @ Q.to(S.dtype) if len(Q) else S


def _orthonormalize_(U: Tensor, theta: Tensor, *, fill: bool, seed: int) -> None:
    empty = theta <= 0
    generator = torch.Generator(U.device).manual_seed(seed)
    if fill:
        orthonormalize_(U, generator, empty)
        return
    present = int(theta.count_nonzero())  # sorted: zero columns are the last ones
    if present:
        orthonormalize_(U[:, :present], generator)


def _merged(
    U: Tensor, values: Tensor, workers: Workers
) -> tuple[Tensor, Tensor, Tensor]:
    """Leading columns (D, W), their eigenvalues (W,), and this worker's part in them.

    The last, C (W, W), says that the new basis is the sum of U_p C_p over workers.
    """
    P, (D, W) = workers.size, U.shape
    split, dtype = Split(D, P), compute_dtype(U.dtype)
    own = split.lengths()[workers.rank]
    parts = [U[split.range_of(worker)] for worker in range(P)]
    rows = workers.exchange(parts, [own * W] * P, "basis").view(P, own, W)
    scales = workers.gather(values, "basis").view(P, W).div(P).sqrt()
    M = (rows.to(dtype) * scales[:, None].to(dtype)).transpose(0, 1).reshape(own, P * W)
    (C,) = workers.total(gram(M))
    theta, X = torch.linalg.eigh(C)
    theta, X = theta.flip(0)[:W], X.flip(1)[:, :W]
    theta = torch.where(theta > ROUNDING[dtype] * theta[0], theta, 0.0)
    # A zero column stays zero: nothing determines it.
    X = X * torch.where(theta > 0, theta, 1.0).rsqrt() * (theta > 0)
    held = torch.zeros(split.length, W, dtype=U.dtype, device=U.device)
    held[:own] = (M @ X.to(dtype)).to(U.dtype)
    whole = workers.gather(held, "basis")[:D].contiguous()
    mine = X.view(P, W, W)[workers.rank]
    return whole, theta, scales[workers.rank][:, None] * mine
