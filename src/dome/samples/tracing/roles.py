"""Which inputs of a model hold samples: a table, filled in once for each input.

An input is called as Python would spell it, from the names in ``forward()``: ``x``,
``batch['ids']``, ``inputs[1]``. Its role is the dimension along which it holds samples,
or None if it holds none. Where roles come from, first match wins:

    declared   ``samples_in`` names the inputs that hold samples; no others do
    earlier    the table has the role from an earlier call with more than one sample
    by size    the first input holds B samples, and so does one with B entries

A role by size is a guess. It is safe for an input that holds none: parameters that meet
it are exact as derived weights. An input that was taken for samples is held against
what the model does with it (``Alignment``): if a parameter meets it, its entries must
also meet those of the first input, entry by entry. That the first input is one of
samples must show in the results, and in its changing. Otherwise the step is refused.
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dome.samples.tracing.axis import Axis
from dome.samples.tracing.nested import Value, named_tensors

Named = list[tuple[str, Tensor]]


def declared(samples_in: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The names in ``samples_in``; one alone may stand without a tuple.

    Quotes are made the same, so that ``batch["ids"]`` is ``batch['ids']``.
    """
    if samples_in is None:
        return None
    names = (samples_in,) if isinstance(samples_in, str) else samples_in
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            "samples_in must be the names of the inputs that hold samples, such as "
            f"('x', \"batch['ids']\"), got {samples_in!r}"
        )
    names = tuple(name.replace('"', "'") for name in names)
    if not names:
        raise ValueError(
            "samples_in names no input: name those that hold samples, or leave it out"
        )
    return names


def check_names(model: nn.Module, samples_in: tuple[str, ...] | None) -> None:
    """Raise ``ValueError`` for a name that the model's ``forward()`` does not take."""
    signature = Signature.of(model)
    for name in samples_in or ():
        root = re.split(r"[.\[]", name, maxsplit=1)[0]
        if not signature.open and root not in (*signature.names, WATCHED.rest):
            raise ValueError(
                f"samples_in names {name!r}, which forward() of "
                f"{type(model).__name__} does not take: it takes "
                f"{', '.join(signature.names)}"
            )


@dataclass(frozen=True, slots=True)
class Signature:
    """The names of what a model is called with.

    Attributes:
        places: Names of inputs by place.
        rest: What further ones are called, ``args`` in ``forward(*args)``.
        names: All names.
        open: Whether it takes any name.
    """

    places: tuple[str, ...] = ()
    rest: str = "args"
    names: tuple[str, ...] = ()
    open: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> "Signature":
        """That of ``forward()``; where it cannot be read, one that takes any name."""
        try:
            found = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        kinds = inspect.Parameter
        by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        rest = [p.name for p in found if p.kind is kinds.VAR_POSITIONAL]
        return cls(
            tuple(p.name for p in found if p.kind in by_place),
            rest[0] if rest else "args",
            tuple(p.name for p in found),
            any(p.kind is kinds.VAR_KEYWORD for p in found),
        )

    def named(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Named:
        """All tensors among the inputs by name, in the order of ``forward()``."""
        given = dict(zip(self.places, args, strict=False))
        more = args[len(self.places) :]
        given |= {f"{self.rest}[{i}]": value for i, value in enumerate(more)}
        order = [name for name in self.names if name in kwargs]
        given |= {name: kwargs[name] for name in (*order, *kwargs)}
        return [pair for name in given for pair in named_tensors(given[name], name)]


# That of ``watch(...)``, which takes anything, with a name or without.
WATCHED = Signature(rest="inputs")


class Roles:
    """The table: where each input of a model holds its samples.

    Args:
        signature: What the inputs are called.
        samples_in: The inputs that hold samples, if they are declared.
    """

    def __init__(
        self, signature: Signature, samples_in: tuple[str, ...] | None = None
    ) -> None:
        self.named = signature.named
        self.declared = samples_in
        # Whether a result has shown the samples of the first input.
        self.is_shown = False
        self._table: dict[str, int | None] = {}
        # Inputs that the model lined up with others: their roles are no guess.
        self._sure: set[str] = set()
        # The last call, until the first input has changed; None from then on.
        self._last: dict[str, Tensor] | None = {}

    def assigned(
        self, named: Named, batch_dim: int, batch: int | None = None
    ) -> tuple[int, dict[str, Axis]]:
        """B, and where each input that holds samples does so, the first one first.

        Args:
            named: The tensors that the model is called with.
            batch_dim: Where the first of them holds samples.
            batch: B, if it is known from elsewhere, such as a packed sequence.
        """
        found: dict[str, Axis] = {}
        if batch is None:
            first, t = self._first(named, batch_dim)
            batch = t.shape[batch_dim]
            found[first] = Axis(batch_dim, batch)
        for name, t in named:
            if name in found:
                continue
            dim = self._role(name, t, batch, batch_dim, next(iter(found), None))
            if dim is not None:
                # Of a declared input n entries in a row may be of one sample.
                found[name] = Axis(dim, batch, max(1, t.shape[dim] // max(1, batch)))
        if batch > 1:  # of one sample, every dimension of size 1 might be the samples'
            self._table |= {
                name: found[name].dim if name in found else None for name, _ in named
            }
        return batch, found

    def check_first(self, named: Named, first: str, others: Sequence[str]) -> None:
        """Raise if the first input stays the same while others of another size change.

        Samples change from batch to batch; a table that comes first does not.
        """
        if self._last is None or not others:
            return
        last, now = self._last, dict(named)
        changed = [
            name
            for name in (first, *others)
            if name not in last
            or not torch.equal(last[name].to(now[name].device), now[name])
        ]
        if first in last and first in changed:
            self._last = None
            return
        self._last = {name: now[name].detach().clone() for name in (first, *others)}
        if first in last and changed:
            raise RuntimeError(
                f"input {first!r} was taken for samples, since it comes first, and "
                f"holds the same numbers again, while {_list(changed)} changed. Name "
                f"the inputs that hold samples: samples_in=({first!r},) if it does, "
                f"samples_in=({changed[0]!r},) if not"
            )

    def confirm(self, names: Iterable[str]) -> None:
        """Remember inputs that hold samples beyond doubt."""
        self._sure |= set(names)

    def _first(self, named: Named, batch_dim: int) -> tuple[str, Tensor]:
        """The input that tells B."""
        if self.declared is not None:
            ours = [pair for pair in named if self._is_declared(pair[0])]
        else:
            known = [pair for pair in named if self._table.get(pair[0]) is not None]
            fresh = [pair for pair in named if pair[0] not in self._table]
            # A number alone, such as a time step, holds no samples.
            ours = known or [pair for pair in fresh if pair[1].ndim] or fresh
        if named and not ours:
            raise RuntimeError(
                f"none of the inputs of this call is known to hold samples: "
                f"{_list(name for name, _ in named)}. Name those that do: "
                f"samples_in=(...), or watch(..., samples_in=(...)) for a call of parts"
            )
        if not ours or ours[0][1].ndim <= batch_dim:
            raise RuntimeError(
                f"the model's input has no dimension {batch_dim} to find the samples "
                'in; pass tensors to model(...), or use samples="microbatch"'
            )
        return ours[0]

    def _role(
        self, name: str, t: Tensor, batch: int, batch_dim: int, first: str | None
    ) -> int | None:
        if self.declared is not None and not self._is_declared(name):
            return None
        if name in self._table and self._table[name] is None:
            return None
        dim = self._table.get(name)
        if self.declared is not None and self._has_several(name, t, batch, batch_dim):
            return batch_dim
        if dim is None:
            dim = _dim_of(t, batch, batch_dim)
        if dim is not None and dim < t.ndim and t.shape[dim] == batch:
            return dim
        if self.declared is not None or name in self._sure:
            dim = _dim_of(t, batch, batch_dim)
            if dim is not None:  # states (layers, B, ..) of as many layers as samples
                return dim
            raise RuntimeError(
                f"input {name!r} of shape {tuple(t.shape)} was taken for samples, and "
                f"{first!r} has {batch} of them now. Give both as many, or name the "
                f"inputs that hold samples: samples_in=({first!r},) if {name!r} does "
                f"not"
            )
        return None

    def _has_several(self, name: str, t: Tensor, batch: int, batch_dim: int) -> bool:
        """Whether a declared input holds n B entries, n of each sample in a row."""
        size = t.shape[batch_dim] if t.ndim > batch_dim else 0
        dim, other = self._table.get(name), _dim_of(t, batch, batch_dim)
        if batch == 0 or size <= batch or size % batch or dim not in (None, batch_dim):
            return False
        if dim == batch_dim or other is None:
            return True
        if batch == 1:
            return False  # every dimension of size 1 will do
        raise RuntimeError(
            f"input {name!r} of shape {tuple(t.shape)} holds {batch} samples along "
            f"dimension {other}, or {size // batch} entries of each along dimension "
            f"{batch_dim}: call the model with another number of samples first, which "
            f"makes it clear"
        )

    def _is_declared(self, name: str) -> bool:
        return any(
            name == own or name.startswith((f"{own}[", f"{own}."))
            for own in self.declared or ()
        )


def _dim_of(t: Tensor, batch: int, batch_dim: int) -> int | None:
    """The dimension of B entries, if it is clear which one."""
    shape = t.shape
    if t.ndim > batch_dim and shape[batch_dim] == batch:
        return batch_dim
    return shape.index(batch) if shape.count(batch) == 1 else None


class Alignment:
    """Which inputs of one forward pass have met the first one, entry by entry.

    Inputs are bits of a number, so that what a tensor was made of is a number too.

    Args:
        names: The inputs whose roles are a guess, by their bits; the first one first.
    """

    def __init__(self, names: dict[int, str] | None = None) -> None:
        self.names = names or {}
        self._groups = list(self.names)
        self._used = 0

    @property
    def is_open(self) -> bool:
        """Whether there is anything to find out."""
        return len(self._groups) > 1

    def use(self, inputs: int) -> None:
        """Note that a parameter met these."""
        self._used |= inputs

    def are_apart(self, inputs: int) -> bool:
        """Whether there are some among these that have not met the others."""
        return sum(bool(group & inputs) for group in self._groups) > 1

    def line_up(self, inputs: int) -> None:
        """Note that these have met entry by entry."""
        # The group of the first input stays the first one.
        met = sum(group for group in self._groups if group & inputs)
        merged = [met if group & inputs else group for group in self._groups]
        self._groups = list(dict.fromkeys(merged))

    def lined_up(self) -> list[str]:
        """The inputs that have met the first one, with it; none if it is alone."""
        own = [name for bit, name in self.names.items() if bit & self._groups[0]]
        return own if len(own) > 1 else []

    def unclear(self, among: int | None = None) -> str | None:
        """An input that a parameter met and that has not met the first one."""
        for group in self._groups[1:]:
            if group & self._used and (among is None or group & among):
                return next(self.names[bit] for bit in self.names if bit & group)
        return None

    def sentence(self, name: str | None, batch: int, how: str) -> str:
        """That an input was taken for samples, and may hold none."""
        first = next(iter(self.names.values()))
        return (
            f"input {name!r} has {batch} entries, as many as {first!r} has samples, "
            f"and {how}: whether it holds samples is not clear. Name all inputs that "
            f"do: samples_in=({first!r},) if {name!r} holds none, samples_in="
            f"({first!r}, {name!r}) if it does"
        )


def not_shown(first: str, others: Sequence[str], batch: int) -> str:
    """The sentence for a call in which another input might be the one with samples."""
    return (
        f"input {first!r} was taken to hold {batch} samples, since it comes first, and "
        f"no result of the model has them in its first dimension; {_list(others)} has "
        f"another size. Name the inputs that hold samples, such as samples_in=("
        f"{others[0]!r},)"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
