"""Algorithms 1 and 2 of the DOME paper, line by line: the file to read first.

Slow and literal, one backward pass a sample and four tall matrices. Everything else in
``dome`` computes the same for less, and is tested against this. Samples are rows here:
the paper's H (D, B) is the transpose of ours.

Shapes: G (B, D) samples, U (D, K) orthonormal columns, λ (K,), the diagonal of Λ.
Numbers at the end of lines are the paper's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def update_sub(U: Tensor, lam: Tensor, G: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Algorithm 2, UpdateSub: turn the nuisance subspace towards a batch.

    Args:
        U: The basis before, shape (D, K).
        lam: Its eigenvalues, shape (K,).
        G: Gradients of the samples, shape (B, D).
        t: The number of the iteration, from 1.

    Returns:
        U and λ after it.
    """
    mu = G.mean(dim=0)  # 4
    H = G - mu  # 6
    V = H @ U  # 8
    W = H.T @ V / len(G)  # 9
    Y = W if t == 1 else (t - 1) / t * U @ torch.diag(lam) + W / t  # 10-14
    U, _ = torch.linalg.qr(Y)  # 15
    lam = torch.linalg.vector_norm(Y, dim=0)  # 16
    return U, lam  # 17-18


class Dome:
    """Algorithm 1 up to its optimizer, which may be any.

    Args:
        model: Its trainable parameters are filtered.
        U: The basis to start from, the Q of a random matrix, shape (D, K).
    """

    def __init__(self, model: nn.Module, U: Tensor) -> None:
        self.model, self.U, self.t = model, U, 0
        self.lam = torch.ones_like(U[0])  # 2

    def filtered(
        self, loss_fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        """The filtered gradient of a batch of inputs x and targets y, shape (D,)."""
        self.t += 1  # 3
        G = per_sample_loop(self.model, loss_fn, x, y)  # 5
        self.U, self.lam = update_sub(self.U, self.lam, G, self.t)  # 6
        g = G.mean(dim=0)  # 8
        return g - self.U @ (self.U.T @ g)  # 9


def per_sample_loop(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """One backward a sample, rows (B, D) in ``model.parameters()`` order."""
    params = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for b in range(len(x)):
        loss = loss_fn(model(x[b : b + 1]), y[b : b + 1])
        grads = torch.autograd.grad(
            loss, params, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows)
