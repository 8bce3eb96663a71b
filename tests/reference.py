"""Slow, literal twins of what the paper's own algorithms, dome.reference, leave out."""

import torch

from dome.reference import per_sample_loop


def center(G):
    return G - G.mean(dim=0, keepdim=True)


def cut_by_svd(matrix, _, rank):
    """The best approximation of rank r."""
    a, values, b = torch.linalg.svd(matrix, full_matrices=False)
    return (a[:, :rank] * values[:rank]) @ b[:rank]


def cut_by_power_step(matrix, last, rank):
    """One step of a power iteration that starts at the row space of the last one."""
    _, _, b = torch.linalg.svd(last, full_matrices=False)
    left, _ = torch.linalg.qr(matrix @ b[:rank].T)
    return left @ (left.T @ matrix)


def low_rank_update(U, lam, G, t, shapes, rank, cut):
    """Algorithm 2 with every column cut to a rank in every weight matrix.

    U (d, k) is explicit, not orthonormal. Line 15's QR(Y) is the QR of Y Z for any
    upper triangular Z of positive diagonal; Z is chosen before the cut, and λ measured
    after it.
    """
    W, _ = positive_qr(U)
    B = len(G)
    H = center(G)
    V = H @ W
    Y = H.T @ V / B
    if t > 1:
        Y = (t - 1) / t * W @ torch.diag(lam) + Y / t
    _, R = positive_qr(W.T @ Y)
    combined, columns = Y @ torch.linalg.inv(R), []
    for column, last in zip(combined.T, U.T, strict=True):
        parts, start = [], 0
        for shape in shapes:
            stop = start + shape.numel()
            part = column[start:stop]
            if len(shape) > 1 and min(shape[0], shape[1:].numel()) > rank:
                before = last[start:stop].view(shape[0], -1)
                part = cut(part.view(shape[0], -1), before, rank).flatten()
            parts.append(part)
            start = stop
        columns.append(torch.cat(parts))
    U = torch.stack(columns, dim=1)
    return U, torch.linalg.vector_norm(U @ R, dim=0)


def positive_qr(A):
    """QR as Gram-Schmidt gives it."""
    Q, R = torch.linalg.qr(A)
    signs = R.diagonal().sign()
    return Q * signs, R * signs[:, None]


def projector(U):
    return U @ U.T


def projector_distance(U, W):
    """Spectral norm of the difference of the D x D projectors.

    In an orthonormal basis of what the columns of both span, where the difference is a
    small matrix of the same norm: no assumption on U or W.
    """
    _, both = torch.linalg.qr(torch.cat([U, W], dim=1))
    U, W = both[:, : U.shape[1]], both[:, U.shape[1] :]
    return torch.linalg.matrix_norm(projector(U) - projector(W), ord=2)


def largest_angle(V, W):
    """Largest principal angle between two subspaces of one dimension, in radians."""
    # The sine form keeps full precision near θ = 0, where arccos(σ) loses half of it.
    residual = W - V @ (V.T @ W)
    return torch.linalg.matrix_norm(residual, ord=2).clamp(max=1.0).asin()


def average_covariance(batches):
    """Mean over batches of the D x D centred covariance."""
    return sum(center(G).T @ center(G) / len(G) for G in batches) / len(batches)


def offline_pca(batches, rank):
    """Leading eigenvectors and eigenvalues of the averaged covariance."""
    values, vectors = torch.linalg.eigh(average_covariance(batches))
    return vectors.flip(1)[:, :rank], values.flip(0)[:rank]


def rank_k_update(U, lam, G, past, newest):
    """Best rank-K part of past U diag(lam) U' + newest H'H/B, by explicit SVD."""
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


def as_function_of_vector(model, loss_of_outputs, x):
    """Loss as a function of one vector of all trainable parameters, and that vector."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def outputs(theta):
        pieces = theta.split([p.numel() for p in named.values()])
        pairs = zip(named.items(), pieces, strict=True)
        values = {n: v.view(p.shape) for (n, p), v in pairs}
        return torch.func.functional_call(model, values, (x,))

    theta = torch.cat([p.detach().flatten() for p in named.values()])
    return (lambda theta: loss_of_outputs(outputs(theta))), outputs, theta


def hessian(model, loss_fn, x, y):
    """The explicit D x D matrix of second derivatives of the mean loss."""
    loss, _, theta = as_function_of_vector(model, lambda z: loss_fn(z, y), x)
    return torch.autograd.functional.hessian(loss, theta)


def gauss_newton(model, loss_fn, x, y):
    """J' H J with the explicit Jacobian of all outputs and Hessian of the loss."""
    _, outputs, theta = as_function_of_vector(model, lambda z: loss_fn(z, y), x)
    z = outputs(theta)
    J = torch.autograd.functional.jacobian(outputs, theta).reshape(z.numel(), -1)
    H = torch.autograd.functional.hessian(lambda z: loss_fn(z, y), z.detach())
    return J.T @ H.reshape(z.numel(), z.numel()) @ J


def gradient_covariance(model, loss_fn, x, y):
    """The explicit D x D covariance of one backward a sample."""
    H = center(per_sample_loop(model, loss_fn, x, y))
    return H.T @ H / len(H)


def noise_scale(batches, P, num=1, every=1):
    """tr Σ / |μ|² of what a projector leaves, McCandlish et al. (2018), weighted alike.

    ``batches`` are rows (B, d) of means of ``num`` samples, each with its projector P,
    taken at every n-th step; newer ones weigh more.
    """
    traces, signals = [], []
    for G, inside in zip(batches, P, strict=True):
        left = G @ inside
        trace = center(left).square().sum() / (len(G) - 1)
        traces.append(num * trace)
        signals.append(left.mean(dim=0).square().sum() - trace / len(G))
    ages = every * torch.arange(len(traces) - 1, -1, -1, dtype=torch.float64)
    weights = 0.99**ages
    return float((torch.stack(traces) @ weights) / (torch.stack(signals) @ weights))
