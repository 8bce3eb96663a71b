"""Slow, literal twins of everything clever in dome."""

import torch


def center(G):
    return G - G.mean(dim=0, keepdim=True)


def update_sub(U, lam, G, t):
    """Algorithm 2 of the paper, line by line (there H is (d, B), here (B, d))."""
    B = len(G)
    mu = G.mean(dim=0)
    H = G - mu
    V = H @ U
    W = H.T @ V / B
    Y = W if t == 1 else (t - 1) / t * U @ torch.diag(lam) + W / t
    U, _ = torch.linalg.qr(Y)
    lam = torch.linalg.vector_norm(Y, dim=0)
    return U, lam


def projector(U):
    return U @ U.T


def projector_distance(U, W):
    """Spectral norm of the difference of the explicit D x D projectors."""
    return torch.linalg.matrix_norm(projector(U) - projector(W), ord=2)


def average_covariance(batches):
    """Mean over batches of the D x D centred covariance."""
    return sum(center(G).T @ center(G) / len(G) for G in batches) / len(batches)


def offline_pca(batches, rank):
    """Leading eigenvectors and eigenvalues of the averaged covariance."""
    values, vectors = torch.linalg.eigh(average_covariance(batches))
    return vectors.flip(1)[:, :rank], values.flip(0)[:rank]


def rank_k_update(U, lam, G, past, newest):
    """Best rank-K approximation of past U diag(lam) U' + newest H'H/B, by explicit SVD."""
    H = center(G)
    M = torch.cat([U * (past * lam).sqrt(), H.T * (newest / len(G)) ** 0.5], dim=1)
    vectors, values, _ = torch.linalg.svd(M, full_matrices=False)
    return vectors[:, : U.shape[1]], values[: U.shape[1]].square()


def fraction(U, G):
    """The paper's minibatch mean of |U U'g_i| / |g_i|, with explicit projections."""
    ratios = [torch.linalg.norm(projector(U) @ g) / torch.linalg.norm(g) for g in G]
    return torch.stack(ratios).mean()


def gaussian_sketch(g, m, generator):
    """R'R g with R (m, d) drawn in full."""
    R = torch.randn(m, len(g), generator=generator, dtype=g.dtype) / m**0.5
    return R.T @ (R @ g)
