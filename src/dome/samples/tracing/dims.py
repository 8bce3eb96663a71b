"""Along which dimensions an operation brings entries together.

Torch's own schemas say where an operation takes its ``dim``; what takes none and keeps
the shape works entry by entry.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType

from torch import Tensor

from dome.samples.tracing.nested import Value
from dome.torch_private import schema_arguments

Dims = tuple[int, ...]

# Matrices in the last two dimensions.
_MATRICES = {
    *("inverse", "det", "logdet", "slogdet", "pinverse", "cholesky", "qr", "svd"),
    *("linalg_inv", "linalg_det", "linalg_slogdet", "linalg_cholesky", "linalg_qr"),
    *("linalg_svd", "linalg_eigh", "linalg_eigvalsh", "linalg_solve", "linalg_pinv"),
    *("matrix_exp", "linalg_matrix_exp", "matrix_power", "linalg_matrix_power"),
    *("trace", "scaled_dot_product_attention", "cov", "corrcoef", "pdist"),
}
_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def acts_along(
    func: Callable[..., Value],
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    x: Tensor,
) -> Dims:
    """Dimensions of x whose entries meet in a result; all of them for a total."""
    where = _known(func)
    if where is None:
        return ()
    place, names, default = where
    if names == ("normalized_shape",):
        return _trailing(x, len(_argument(args, kwargs, place, names, ())))
    if place < 0:
        return _trailing(x, default)
    given = _argument(args, kwargs, place, names, default)
    if isinstance(given, Tensor | str):
        return ()  # torch.max(x, y); names of dimensions
    given = (given,) if isinstance(given, int) else given
    if not given:
        return _without_dim(func, x)
    return tuple(d % x.ndim for d in given if isinstance(d, int) and x.ndim)


def has_dims(func: Callable[..., Value]) -> bool:
    """Whether it is known along which dimensions an operation works."""
    return _known(func) is not None


def _trailing(x: Tensor, count: int) -> Dims:
    return tuple(range(max(x.ndim - count, 0), x.ndim))


def _argument(
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    place: int,
    names: tuple[str, ...],
    default: Value,
) -> Value:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _without_dim(func: Callable[..., Value], x: Tensor) -> Dims:
    if "soft" in func.__name__:  # torch's own choice, of which it warns
        return (0 if x.ndim in (0, 1, 3) else 1,)
    return tuple(range(x.ndim))


@cache
def _known(func: Callable[..., Value]) -> tuple[int, tuple[str, ...], Value] | None:
    """Where ``dim`` stands, its names and its default; (-1, (), count) without one."""
    name = func.__name__
    name = name if name.startswith("__") else name.rstrip("_")
    if name in ("layer_norm", "rms_norm"):
        return 1, ("normalized_shape",), None
    if name in ("linear", "bilinear"):
        return -1, (), 1
    if name in _MATRICES:
        return -1, (), 2
    if "pool" in name or name.startswith("conv"):
        spatial = next((n for ends, n in _SPATIAL.items() if ends in name), None)
        channels = name.startswith("conv")
        return None if spatial is None else (-1, (), spatial + channels)
    if isinstance(func, FunctionType):
        return _of_signature(func)
    return _of_schemas(name)


def _of_signature(func: FunctionType) -> tuple[int, tuple[str, ...], Value] | None:
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # Tensor.__pow__ and its kin are C inside
        return None
    for place, p in enumerate(parameters):
        if p.name in ("dim", "axis", "dims"):
            default = None if p.default is inspect.Parameter.empty else p.default
            return place, (p.name,), default
    return None


def _of_schemas(name: str) -> tuple[int, tuple[str, ...], Value] | None:
    if name == "renorm":
        return None  # its dim is the one that it leaves alone
    for arguments in schema_arguments(name):
        for place, (argument, kind, default) in enumerate(arguments):
            if argument == "dim" and "Dimname" not in kind:
                return place, ("dim", "axis"), default
    return None
