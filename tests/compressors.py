"""One table of all compressors: a new one is a line here and inherits the contract."""

from dome.compression import (
    QSGD,
    ErrorFeedback,
    GaussianSketch,
    HadamardSketch,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)


def shapes(dim):
    """Parameters of ``dim`` numbers together: a matrix, a convolution and a bias."""
    if dim < 60:
        return [(dim,)]
    rows = dim // 20
    return [(rows, 10), (4, 5, 1, 1), (dim - 10 * rows - 20,)]


def rate(dim):
    return min(4.0, dim)


COMPRESSORS = {
    "gaussian": lambda dim: GaussianSketch(rate(dim)),
    "hadamard": lambda dim: HadamardSketch(rate(dim)),
    "topk": lambda dim: TopK(rate(dim)),
    "randomk": lambda dim: RandomK(rate(dim)),
    "signsgd": lambda dim: SignSGD(),
    "qsgd": lambda dim: QSGD(3, bucket_size=16),
    "terngrad": lambda dim: TernGrad(bucket_size=16),
    "powersgd": lambda dim: PowerSGD(shapes(dim), rank=2),
    # A kind each: biased, unbiased and summed, with a state of its own.
    "topk, error feedback": lambda dim: ErrorFeedback(TopK(rate(dim))),
    "randomk, error feedback": lambda dim: ErrorFeedback(RandomK(rate(dim))),
    "powersgd, error feedback": lambda dim: ErrorFeedback(PowerSGD(shapes(dim))),
}


def named(**wanted):
    """Names of the compressors with these attributes, for parametrize."""
    return [
        name
        for name, make in COMPRESSORS.items()
        if all(getattr(make(64), key) == value for key, value in wanted.items())
    ]
