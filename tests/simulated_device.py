"""A simulated accelerator: real numbers, an error where devices mix, waits listed.

    with simulated_device() as device:
        x = torch.ones(3, device=device.name)
        with device.counting() as waits:
            float(x.sum())
        print(waits)  # [Wait(operation='_local_scalar_dense', file=..., line=...)]

Tensors on it wrap tensors on the CPU, so that results can be compared bit for bit.
What is listed as a wait is what makes the host wait for a CUDA stream, torch's own
``set_sync_debug_mode`` being the model: reading a number, a result whose shape depends
on values, decompositions that check for errors, a copy to or from the host.
"""

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    return_and_correct_aliasing,
)

NAME = "sim"
# 2.8 has no means to write a backend in Python; 2.10, 2.13 and 2.15 have.
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

Operation = Callable[..., Any]
Names = dict[str, Any]
NESTED = (list, tuple)

aten = torch.ops.aten

READS = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("_local_scalar_dense", "default"),
        ("equal", "default"),
        ("allclose", "default"),
        ("nonzero", "default"),
        ("masked_select", "default"),
        ("_unique2", "default"),
        ("unique_dim", "default"),
        ("unique_consecutive", "default"),
        ("bincount", "default"),
        ("histc", "default"),
        # These read whether they succeeded.
        ("_linalg_check_errors", "default"),
        ("_linalg_eigh", "default"),
        ("_linalg_svd", "default"),
        ("linalg_eig", "default"),
        ("linalg_lstsq", "default"),
    )
)
INDEXING = frozenset(
    (
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
    )
)
COPIES = frozenset(
    (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default)
)
# Lengths of sequences are on the host here, and so are the sizes that come of them.
PACKING = frozenset(
    (aten._pack_padded_sequence.default, aten._pack_padded_sequence_backward.default)
)
MIXING = COPIES | PACKING
# A single number may stay on the host elsewhere; where tensors are joined it may not.
JOINS = frozenset((aten.cat.default, aten.stack.default))


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where the host waits for the device, and the operation that does."""

    operation: str
    file: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{self.operation} at {self.file}:{self.line}: {code}"


@dataclass(slots=True)
class Device:
    """The simulated device while it is switched on.

    Attributes:
        name: For ``device=`` and ``.to()``.
        waits: Every wait since it was switched on.
    """

    name: str = f"{NAME}:0"
    waits: list[Wait] = field(default_factory=list)

    def generator(self, seed: int) -> torch.Generator:
        """A generator on the device; it draws what one on the CPU draws."""
        return torch.Generator(self.name).manual_seed(seed)

    @contextmanager
    def counting(self) -> Iterator[list[Wait]]:
        """A list that holds the waits of the block when the block has ended."""
        waits: list[Wait] = []
        before = len(self.waits)
        yield waits
        waits += self.waits[before:]


_device: Device | None = None  # the one that is switched on, if any


@contextmanager
def simulated_device() -> Iterator[Device]:
    """Switch the device on: tensors and generators can be made on it inside."""
    global _device  # noqa: PLW0603 (autograd's threads have to find it)
    register()
    _device = device = Device()
    lift = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) is a copy
    swap = torch.__future__.get_swap_module_params_on_conversion()
    # Else model.to() would make new parameters, and of a tied one two.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with mock.patch.object(torch, "Generator", _Generators), _Mode():
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)
        torch.__future__.set_swap_module_params_on_conversion(swap)
        _Generators.made.clear()
        _device = None


class DeviceTensor(Tensor):
    """A tensor on the device: the shape and type of ``host``, which has the numbers."""

    host: Tensor
    constant = False  # a number of Python's that an operation takes as a tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=f"{NAME}:0",
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Operation,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Names | None = None,
    ) -> object:
        return _run(func, args, kwargs or {})

    def tolist(self) -> object:
        _note("tolist")
        return self.host.tolist()

    def numpy(self, **_: object) -> object:
        raise TypeError(
            f"cannot convert a tensor on {self.device} to numpy: use .cpu()"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy._is_param = True
        return memo.setdefault(id(self), copy)

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


class DeviceGenerator(torch.Generator):
    """A generator that tensors on the device take, and others refuse."""

    @property
    def device(self) -> torch.device:
        return torch.device(f"{NAME}:0")


class _EitherGenerator(type):
    """Stands for ``torch.Generator``, which makes none for a backend in Python."""

    plain = torch.Generator

    def __call__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        if torch.device(device).type != NAME:
            return cls.plain(device)
        made = DeviceGenerator()
        cls.made[made._cdata] = made
        return made

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.plain)


class _Generators(metaclass=_EitherGenerator):
    # By the address of what they wrap: operations get to see another wrapper of it.
    made: dict[int, DeviceGenerator] = {}  # noqa: RUF012


class _Mode(TorchDispatchMode):
    """Sees operations without a tensor on the device: those that make one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping it costs a tenth

    def __torch_dispatch__(
        self,
        func: Operation,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Names | None = None,
    ) -> object:
        return _run(func, args, kwargs or {})


def _run(func: Operation, args: Sequence[Any], kwargs: Names) -> object:
    """Do on the host what an operation would do on the device."""
    values: list[Any] = []
    _add_leaves((*args, *kwargs.values()), values)
    tensors = [value for value in values if isinstance(value, Tensor)]
    here = [isinstance(t, DeviceTensor) for t in tensors]
    wanted = kwargs.get("device")
    arrives = any(here) if wanted is None else torch.device(wanted).type == NAME
    if func is aten.copy_.default:
        arrives = here[0]
    _check(func, tensors, here, values, arrives)
    if not arrives and not any(here):
        return func(*args, **kwargs)
    _watch(func, args, kwargs, here, arrives)
    there = {name: _changed(DeviceTensor, _host, v) for name, v in kwargs.items()}
    if wanted is not None:
        there["device"] = torch.device("cpu")
    kernel = CELLS.get(func, func)
    out = kernel(*_changed(DeviceTensor, _host, tuple(args)), **there)
    if not arrives:
        return out
    if func is aten._pack_padded_sequence.default:
        return DeviceTensor(out[0]), out[1]
    out = _changed(Tensor, DeviceTensor, out)
    if func is aten.scalar_tensor.default:
        out.constant = True
    if func.namespace != "aten" or not tensors or not _has_aliases(func):
        return out  # collectives answer with a handle, factories alias nothing
    return return_and_correct_aliasing(func, args, kwargs, out)


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    """A kernel that the CPU lacks, of projected inputs and hidden states."""
    gates = sum((b for b in biases if b is not None), x + h)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, gates


def _gru_cell(
    x: Tensor, h: Tensor, state: Tensor, *biases: Tensor
) -> tuple[Tensor, ...]:
    """The same of a GRU."""
    b_x, b_h = (0 if b is None else b for b in biases or (None, None))
    (xr, xz, xn), (hr, hz, hn) = (x + b_x).chunk(3, 1), (h + b_h).chunk(3, 1)
    z = (xz + hz).sigmoid()
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + z * (state - n), x


CELLS = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
}


@cache
def _has_aliases(func: Operation) -> bool:
    """Whether a result is an argument, or a view of one."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _add_leaves(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, NESTED):
            _add_leaves(value, found)
        else:
            found.append(value)


def _changed(kind: type, change: Callable[[Any], object], value: object) -> Any:
    """A value, with those of a kind inside of lists and tuples changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, NESTED):
        return type(value)([_changed(kind, change, v) for v in value])
    return value


def _host(tensor: DeviceTensor) -> Tensor:
    return tensor.host


def _check(
    func: Operation,
    tensors: list[Tensor],
    here: list[bool],
    values: list[Any],
    arrives: bool,
) -> None:
    """Refuse what a real device refuses: tensors and generators of two places."""
    if any(here) and not all(here) and func not in MIXING:
        away = [t for t, is_here in zip(tensors, here, strict=True) if not is_here]
        mixed = [t for t in away if t.dim() > 0 or func in JOINS]
        if mixed:
            shapes = ", ".join(str(tuple(t.shape)) for t in mixed)
            raise RuntimeError(f"{func} mixes {NAME} and cpu: {shapes} on the cpu")
    for value in values:
        if isinstance(value, _EitherGenerator.plain):
            is_ours = value._cdata in _Generators.made
            if is_ours != arrives:
                place = NAME if is_ours else "cpu"
                raise RuntimeError(f"{func} elsewhere got a generator on {place}")


def _watch(
    func: Operation,
    args: Sequence[Any],
    kwargs: Names,
    here: list[bool],
    arrives: bool,
) -> None:
    """List the waits of an operation, if any."""
    if func in COPIES:
        blocking = not (kwargs.get("non_blocking") or args[2:] == (True,))
        crosses = any(here) != all(here) or (here and here[0] != arrives)
        if crosses and (blocking or not arrives):
            _note(f"{func} {'from' if arrives else 'to'} the host")
    elif any(here):
        counts = func is aten.repeat_interleave.Tensor
        by_value = _is_masked(func, args) or (counts and not kwargs.get("output_size"))
        if func in READS or by_value:
            _note(str(func))


def _is_masked(func: Operation, args: Sequence[Any]) -> bool:
    """Whether an index is a mask, so that it has to be counted how many are meant."""
    if func not in INDEXING:
        return False
    # A number of Python's put under a mask is a masked_fill, which does not wait.
    number = len(args) > 2 and (args[2].device.type == "cpu" or args[2].constant)
    masks = (torch.bool, torch.uint8)
    return not number and any(t is not None and t.dtype in masks for t in args[1])


def _note(operation: str) -> None:
    if _device is not None:
        frame = _caller(sys._getframe(1))
        file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("?", 0)
        _device.waits.append(Wait(operation, file, line))


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor this file's."""
    inside = (str(Path(torch.__file__).parent), __file__)
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return frame


def register() -> None:
    """Tell torch of the device: once a process, and it cannot be taken back.

    It has to come before the first backward pass, which starts autograd's threads, one
    for each device that it knows.
    """
    if torch._C._get_privateuse1_backend_name() == NAME:
        return

    class Module(backend_registration._DummyBackendModule):
        # Off outside of the context: torch.accelerator and what asks it would use it.
        def is_available(self) -> bool:
            return _device is not None

        def device_count(self) -> int:
            return int(_device is not None)

        def synchronize(self, _: object = None) -> None:
            pass  # all work is done as soon as it is asked for

        # Numbers without a generator come from the CPU's.
        def get_rng_state(self, _: object = None) -> Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: Tensor, _: object = None) -> None:
            torch.set_rng_state(state)

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return _device is not None

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=Module(), hook=Hook()
    )
