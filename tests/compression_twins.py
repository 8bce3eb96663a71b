"""Slow, literal twins of the compressors, one number after the other."""

import torch


def topk(g, k):
    order = sorted(range(len(g)), key=lambda i: -abs(float(g[i])))
    c = torch.zeros_like(g)
    for i in order[:k]:
        c[i] = g[i]
    return c


def randomk(g, indices):
    c = torch.zeros_like(g)
    for i in indices:
        c[i] = g[i] * len(g) / len(indices)
    return c


def signsgd(g):
    scale = sum(abs(float(x)) for x in g) / len(g)
    return torch.tensor([scale if x >= 0 else -scale for x in g], dtype=g.dtype)


def qsgd(g, num_levels, bucket_size, uniforms):
    """sign(x) ‖bucket‖/s times the level below s|x|/‖bucket‖, or the one above it."""
    c = torch.zeros_like(g)
    for i in range(len(g)):
        start = i - i % bucket_size
        bucket = g[start : start + bucket_size]
        norm = float(sum(float(x) ** 2 for x in bucket)) ** 0.5
        if norm == 0:
            continue
        share = num_levels * abs(float(g[i])) / norm
        below = int(share)
        # A negative entry is rounded with 1 − u: as likely, and what the level of
        # smallest value at least s x/‖bucket‖ + u − 1 comes to.
        up = float(uniforms[i]) if g[i] < 0 else 1 - float(uniforms[i])
        level = below + (1 if up < share - below else 0)
        c[i] = norm / num_levels * (level if g[i] >= 0 else -level)
    return c


def terngrad(g, bucket_size, uniforms):
    c = torch.zeros_like(g)
    for i in range(len(g)):
        start = i - i % bucket_size
        most = max(abs(float(x)) for x in g[start : start + bucket_size])
        up = float(uniforms[i]) if g[i] < 0 else 1 - float(uniforms[i])
        if most > 0 and up < abs(float(g[i])) / most:
            c[i] = most if g[i] > 0 else -most
    return c


def hadamard_matrix(order):
    """H_ij = (−1)^(number of ones that i and j have in common) / √order."""
    rows = [[(-1) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    return torch.tensor(rows, dtype=torch.float64) / order**0.5


def hadamard_sketch(signs, positions, count, used, length):
    """The explicit (M, D) matrix √(N/M) S H E.

    Zeros are at the end of every block; positions count the first numbers of all
    blocks, then the second ones.
    """
    N, M, D = count * length, len(positions), len(signs)
    H = torch.block_diag(*[hadamard_matrix(length)] * count)
    E = torch.zeros(N, D, dtype=torch.float64)
    for i in range(D):
        E[i // used * length + i % used, i] = signs[i]
    S = torch.zeros(M, N, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        S[row, position % count * length + position // count] = 1
    return (N / M) ** 0.5 * S @ H @ E


def gram_schmidt(columns):
    done = []
    for column in columns:
        left = column.clone()
        for _ in range(2):
            for q in done:
                left = left - (q @ left) * q
        done.append(left / left.norm())
    return done


def powersgd(M, Q):
    """One step for one matrix, with explicit sums: returns P Qᵀ and the new Q."""
    n, m, r = M.shape[0], M.shape[1], Q.shape[1]
    P = torch.zeros(n, r, dtype=M.dtype)
    for i in range(n):
        for j in range(r):
            P[i, j] = sum(M[i, c] * Q[c, j] for c in range(m))
    P = torch.stack(gram_schmidt([P[:, j] for j in range(r)]), dim=1)
    new = torch.zeros(m, r, dtype=M.dtype)
    for c in range(m):
        for j in range(r):
            new[c, j] = sum(M[i, c] * P[i, j] for i in range(n))
    return P @ new.T, new


def bits_of(payload):
    """All bits of a tensor of bytes, lowest first."""
    return [(byte >> j) & 1 for byte in payload.tolist() for j in range(8)]


def integers_in_planes(payload, count, width):
    """Integers whose lowest bits come first, then the next bits."""
    bits = bits_of(payload)
    return [sum(bits[j * count + i] << j for j in range(width)) for i in range(count)]


def trits_of(payload, count):
    digits = [byte // 3**j % 3 for byte in payload.tolist() for j in range(5)]
    return digits[:count]
