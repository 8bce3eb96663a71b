import torch


def low_rank_stream(rng, dim, num_samples, num_batches, rank, noise=1e-3, mean=1.0):
    """Samples around a mean, with variance in ``rank`` directions, little elsewhere."""
    directions, _ = torch.linalg.qr(
        torch.randn(dim, rank, generator=rng, dtype=torch.float64)
    )
    scales = torch.linspace(2.0, 1.0, rank, dtype=torch.float64)
    center = mean * torch.randn(dim, generator=rng, dtype=torch.float64)
    for _ in range(num_batches):
        signal = torch.randn(num_samples, rank, generator=rng, dtype=torch.float64)
        rest = torch.randn(num_samples, dim, generator=rng, dtype=torch.float64)
        yield (signal * scales) @ directions.T + noise * rest + center


def decaying_stream(rng, dim, num_samples, num_batches, decay=0.5, dtype=torch.float64):
    """Samples whose i-th direction has variance 100 i^(-2 decay)."""
    num_directions = min(dim, 200)
    directions, _ = torch.linalg.qr(
        torch.randn(dim, num_directions, generator=rng, dtype=torch.float64)
    )
    scales = 10 * torch.arange(1, num_directions + 1, dtype=torch.float64) ** -decay
    for _ in range(num_batches):
        z = torch.randn(num_samples, num_directions, generator=rng, dtype=torch.float64)
        yield ((z * scales) @ directions.T).to(dtype)
