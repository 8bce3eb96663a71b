"""Which inputs of a model hold samples, and where.

A sample is an entry along one dimension of the tensors that the model is called with.
Three other kinds of input are recognised:

- bags: ``(indices, offsets)`` of a model with an ``EmbeddingBag``; a sample is a bag;
- a packed sequence; a sample is a sequence;
- graphs in one batch, as PyTorch Geometric stacks them, where a vector names each
  node's: arguments named ``batch`` and ``edge_index``, or one object that has both as
  attributes; a sample is a graph.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dome.samples.tracing.axis import Axis, Labels
from dome.samples.tracing.nested import Value, is_dense, named_tensors
from dome.samples.tracing.origins import Place

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

    def check_dense(self, named: Named) -> None:
        """Raise if an input that holds samples, or may, is sparse or nested."""
        for number, (name, t) in enumerate(named):
            ours = number == 0 if self.declared is None else self._is_declared(name)
            if ours and not is_dense(t):
                raise RuntimeError(
                    f"input {name!r} is taken for samples and has the layout "
                    f"{t.layout}, which is not dense: pass a dense tensor, name the "
                    f"inputs that hold samples in samples_in=(...), or use "
                    f'samples="microbatch"'
                )

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
                f"input {name!r} of shape {tuple(t.shape)} was taken for samples, but "
                f"{first!r} has {batch} of them now. Give both the same number, or "
                f"name the inputs that hold samples: samples_in=({first!r},) if "
                f"{name!r} does not"
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
        # Whether there is anything to find out.
        self.is_open = len(self._groups) > 1

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
        self.is_open = len(self._groups) > 1

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """The samples that a model is called with.

    Attributes:
        num_samples: B.
        places: Where each tensor holds them, and its name if that is a guess by size.
        fixed: The tensors that hold none.
        spaces: Ids of rows by their number, for rows that nothing was written to.
        others: Names of fixed inputs of another size, if that is a guess, too.
    """

    num_samples: int
    places: list[tuple[Tensor, Place, str]]
    fixed: list[Tensor] = field(default_factory=list)
    spaces: dict[int, Tensor] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def inputs_of(
    model: nn.Module,
    args: Value,
    kwargs: Value,
    roles: Roles,
    batch_dim: int,
    last_offset: bool | None,
) -> Inputs:
    """The samples among the arguments of a model.

    Args:
        model: The model.
        args: What it is called with.
        kwargs: The same by name.
        roles: Which of these hold samples.
        batch_dim: Where tensors hold the samples.
        last_offset: Whether offsets of bags have one more at the end
            (``include_last_offset``); None if the model has no bags.
    """
    graphs = _graphs_in(model, args, kwargs)
    if graphs is not None:
        places = [(t, place, "") for t, place in graphs.places()]
        return Inputs(graphs.num_graphs, places, spaces=graphs.spaces)
    named = roles.named(args, kwargs)
    packed = _packed_in((*args, *kwargs.values()))
    if packed is not None:
        rows = _sequences_of(packed)
        parts = _Known({id(packed.data): rows}, packed)
        return parts.with_others(named, roles, rows.batch, 0)
    if last_offset is not None:
        pair = [t for _, t in named[:2] if t.ndim == 1 and not t.is_floating_point()]
        if len(pair) == 2:
            batch = len(pair[1]) - last_offset
            return _bags(named, pair[1], batch).with_others(
                named, roles, batch, batch_dim
            )
    return _Known().with_others(named, roles, None, batch_dim)


@dataclass(frozen=True, slots=True)
class _Known:
    """Inputs whose roles are told by their kind.

    Attributes:
        places: Where those that hold samples do so, by the ``id`` of the tensor.
        parts: All such inputs, with those that hold none.
    """

    places: dict[int, Place] = field(default_factory=dict)
    parts: Sequence[Tensor | None] = ()

    def with_others(
        self, named: Named, roles: Roles, batch: int | None, batch_dim: int
    ) -> Inputs:
        """These and all further inputs, which have their roles from the table."""
        known = {id(t) for t in self.parts if t is not None}
        others = [pair for pair in named if id(pair[1]) not in known]
        if batch is None:
            roles.check_dense(others)
        others = [pair for pair in others if is_dense(pair[1])]
        batch, found = roles.assigned(others, batch_dim, batch)
        by_kind = {n: self.places[id(t)] for n, t in named if id(t) in self.places}
        tensors, guessed = dict(named), roles.declared is None
        # One tensor under two names has one role.
        held: dict[int, tuple[str, Place]]
        held = {id(tensors[name]): (name, place) for name, place in found.items()}
        held |= {id(tensors[name]): (name, place) for name, place in by_kind.items()}
        fixed = [(n, t) for n, t in others if id(t) not in held]
        sizes = [n for n, t in fixed if t.ndim > batch_dim and t.shape[batch_dim] > 1]
        sizes = sizes if guessed and batch > 1 else []
        if found:
            roles.check_first(named, next(iter(found)), sizes)
        return Inputs(
            batch,
            [
                (tensors[name], place, name if guessed else "")
                for name, place in held.values()
            ],
            [t for _, t in fixed],
            others=sizes,
        )


def _bags(named: Named, offsets: Tensor, batch: int) -> _Known:
    """Flat tensors, whose entries belong to the bags that start at the offsets."""
    first = named[0][1]
    flat = [t for _, t in named if t.ndim == 1 and len(t) == len(first)]
    rows = torch.arange(len(first), device=first.device)
    ids = torch.searchsorted(offsets[:batch], rows, right=True) - 1
    return _Known({id(t): Labels(ids.to(t.device), batch) for t in flat}, flat)


def _packed_in(values: Value) -> PackedSequence | None:
    """The first packed sequence inside nested inputs."""
    for value in values:
        if isinstance(value, PackedSequence):
            return value
        if isinstance(value, dict | tuple | list):
            found = _packed_in(value.values() if isinstance(value, dict) else value)
            if found is not None:
                return found
    return None


def _sequences_of(packed: PackedSequence) -> Labels:
    """Which sequence every row of its data belongs to, as they came."""
    data, sizes = packed.data, packed.batch_sizes
    # Rows lie time by time, and those of one time by falling length.
    ids = torch.cat([torch.arange(int(n)) for n in sizes]).to(data.device)
    if packed.sorted_indices is not None:
        ids = packed.sorted_indices[ids]
    return Labels(ids.view(-1, *(1,) * (data.ndim - 1)), int(sizes[0]))


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The inputs of a model that takes several graphs at once.

    Attributes:
        inputs: Tensors by their names.
        batch: The graph of every node, shape (N,).
        edges: The nodes of every edge, shape (2, E).
        num_graphs: B.
    """

    inputs: dict[str, Tensor]
    batch: Tensor
    edges: Tensor
    num_graphs: int

    def places(self) -> Iterator[tuple[Tensor, Place]]:
        """Where each input holds its graphs; indices hold none."""
        owners = self.spaces
        for name, t in self.inputs.items():
            if t is self.batch or t is self.edges or not t.ndim:
                continue
            rows = len(t)
            if name.startswith("edge") and rows == self.edges.shape[1]:
                yield t, self._by(self.of_edges, t)
            elif rows in owners:
                yield t, self._by(owners[rows], t)
            elif rows == self.num_graphs:
                yield t, Axis(0, self.num_graphs)

    @property
    def of_edges(self) -> Tensor:
        """The graph of every edge, shape (E,)."""
        return self.batch[self.edges[0]]

    @property
    def spaces(self) -> dict[int, Tensor]:
        """The graph of every row of a tensor with one row a node, or one an edge."""
        return {self.edges.shape[1]: self.of_edges, len(self.batch): self.batch}

    def _by(self, ids: Tensor, t: Tensor) -> Labels:
        return Labels(ids.view(-1, *(1,) * (t.ndim - 1)), self.num_graphs)


def _graphs_in(model: nn.Module, args: Value, kwargs: Value) -> _Graphs | None:
    """The graphs among the inputs of a model, None if it is not called with any."""
    # A quick no for all other models, which every forward pass asks.
    code = getattr(model.forward, "__code__", None)
    named = "edge_index" in kwargs or (
        code is not None and "edge_index" in code.co_varnames
    )
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor) and hasattr(value, "edge_index"):
            fields = value.to_dict() if hasattr(value, "to_dict") else vars(value)
            count = getattr(value, "num_graphs", None)
            return _stacked({**fields, "batch": value.batch}, count)
    if not named:
        return None
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    return _stacked(bound.arguments, bound.arguments.get("batch_size"))


def _stacked(named: dict[str, Value], count: Value) -> _Graphs | None:
    batch, edges = named.get("batch"), named.get("edge_index")
    if not isinstance(batch, Tensor) or not isinstance(edges, Tensor):
        return None
    if batch.ndim != 1 or batch.is_floating_point() or len(edges) != 2:
        return None
    tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
    # Asks the device, as the pooling of these models does.
    num = count if isinstance(count, int) else int(batch.max()) + 1 if len(batch) else 0
    return _Graphs(tensors, batch, edges, num)
