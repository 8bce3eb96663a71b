"""``hook``: the filter as a communication hook of DDP, in front of another hook.

Letters: D numbers in the gradient, K directions, P workers, n numbers in a bucket. DDP
hands over its gradient bucket by bucket while ``backward()`` runs. A block of the
layout is filtered as soon as all of its gradient is there, and a bucket is sent as soon
as all of its blocks are filtered. Every worker filters its own gradient, with a basis
of D K numbers.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dome import state as states
from dome.compression import Compressor
from dome.diagnostics import FilterStats, collect_stats
from dome.diagnostics.averages import Averages
from dome.distributed.attachment import in_ddp, named_options
from dome.distributed.handshake import check_same_options
from dome.distributed.merging import check_mergeable, merge_bases
from dome.distributed.messages import Exchange
from dome.distributed.workers import Workers
from dome.filter import norm_of, not_finite
from dome.options import FilterOptions, Options
from dome.parameters import Block, Layout
from dome.torch_private import communication_hook, own_arithmetic
from dome.trackers import Tracker
from dome.world import make_tracker

if TYPE_CHECKING:  # its public name has no type
    from dome.torch_private import GradBucket
else:
    GradBucket = dist.GradBucket

InnerHook = Callable[[Any, GradBucket], Future[Tensor]]


def hook(state: "HookState", bucket: GradBucket) -> Future[Tensor]:
    """Filter a bucket of DDP, and send it by the inner hook.

        ddp_model.register_comm_hook(state, dome.distributed.hook)

    Args:
        state: Made for the same model.
        bucket: As DDP hands it over.

    Returns:
        What will be the bucket's average over workers.
    """
    return state.receive(bucket)


@dataclass
class _Waiting:
    """A bucket that is not sent yet.

    Attributes:
        bucket: The bucket.
        result: DDP waits for it: the average over workers.
        rows: The same bucket of every worker, (P, n), and what fills it; None at a step
            that learns nothing from it.
    """

    bucket: GradBucket
    result: Future[Tensor]
    rows: tuple[Tensor, dist.Work] | None


@dataclass
class _Step:
    """What has happened so far in one step. Numbers are columns of the gradient."""

    waiting: list[_Waiting] = field(default_factory=list)
    sent: list[tuple[Future[Tensor], Future[Tensor]]] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)  # views into buckets
    rows: dict[int, Tensor] = field(default_factory=dict)  # (P, numbers), if gathered
    filtered: set[int] = field(default_factory=set)
    squares: list[Tensor] = field(default_factory=list)  # of norms before and after
    seconds: float = 0.0

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """Of the gradient before and after the filter."""
        if not self.squares:
            return None
        before, after = torch.stack(self.squares).sum(dim=0).sqrt()
        return before, after


class HookState:
    """State of ``dome.distributed.hook``: a filter inside DDP's own communication.

        state = dome.distributed.HookState(ddp_model, rank=32, layout="layerwise")
        ddp_model.register_comm_hook(state, dome.distributed.hook)

    The filter belongs to parameters, not to buckets: DDP may rebuild these, with
    ``gradient_as_bucket_view`` and ``static_graph`` as ever.

    Args:
        model: The DDP model. Torch takes one communication hook for each.
        rank: Number of directions K to remove; with ``layout="layerwise"`` per layer.
        inner: What sends filtered gradients: another communication hook (torch's
            ``powerSGD_hook``, ``bf16_compress_hook``, one of your own), which gets each
            bucket when it is filtered; or one of ``dome.compression``, which gets the
            whole gradient with the last bucket. If not given, an all-reduce.
        inner_state: The state of an inner hook.
        samples: "per_sample": each worker learns a basis from its own samples, nothing
            more is sent, and a step is one backward pass. Or "worker": the workers'
            gradients are the samples of one basis, which all hold. They are gathered at
            every ``update_every``-th step, P/2 times the bytes of DDP at that step.
        scaler: The ``GradScaler`` in use, so that its factor is taken out of samples.
        **options: Those of ``dome.attach`` but ``after``, ``direction_rank`` and
            ``stream``. ``warmup=n`` filters after n steps.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        rank: int | Mapping[str, int],
        *,
        inner: Compressor | InnerHook | None = None,
        inner_state: object = None,
        samples: str = "per_sample",
        scaler: torch.amp.GradScaler | None = None,
        **options: Unpack[Options],
    ) -> None:
        owner, model = "dome.distributed.HookState", in_ddp(model)
        given = {**options, "scaler": scaler}
        self._options = chosen = named_options(owner, rank, samples, given)
        _check(model, chosen, inner, inner_state)
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters()
        trained = [p for name, p in named if name not in ignored]
        self._layout = layout = Layout(model.module, chosen.layout, only=trained)
        self._starts = {
            block: {
                s.start for s in layout.slots if block.start <= s.start < block.stop
            }
            for block in layout.blocks
        }  # first columns of the parameters of each block
        self._workers = workers = Workers(model.process_group, layout.device)
        words = {"inner": inner, "inner_state": type(inner_state), "samples": samples}
        check_same_options(workers, chosen, layout, **words)

        self._gathers, self._source = samples == "worker", None
        if self._gathers:
            workers.agree_on(chosen.generator)
        self._tracker = make_tracker(layout, chosen)
        if not self._gathers:
            for tracker in self._tracker.by_name.values():
                check_mergeable(tracker, workers.size)
            self._source = chosen.source_for(model.module, layout, self._turn)
        # An all-reduce is sent at once. Another hook may send more from callbacks,
        # which gloo runs in any order: it ends before anything else is sent.
        self._in_turn = inner is not None
        self._exchange = Exchange(inner, workers) if _is_compressor(inner) else None
        sends: Any = allreduce_hook if inner is None else inner
        own_state = model.process_group if inner is None else inner_state
        self._inner: Callable[[GradBucket], Future[Tensor]] = partial(sends, own_state)
        self._num_steps, self._is_attached = 0, True
        self._step, self._last = _Step(), _Step()
        self._stats: FilterStats | None = None
        self._averages = Averages()
        self._handle = model.register_forward_pre_hook(self._arm)

    def _arm(self, *_: object) -> None:
        """Before a forward pass: ``.grad`` is as the last step left it."""
        if self._source is not None:
            self._source.arm(self._options.takes_samples(self._num_steps))

    def _turn(self, name: str, rows: Tensor) -> None:
        """Algorithm 1, line 6, for one block; called while ``backward()`` runs."""
        begin, scale = time.perf_counter(), self._options.sample_scale(len(rows))
        self._tracker.update_block(name, rows, scale)
        self._step.seconds += time.perf_counter() - begin

    @torch.no_grad()
    @own_arithmetic
    def receive(self, bucket: GradBucket) -> Future[Tensor]:
        """Take the next bucket of a step; filter and send all that is complete."""
        step, is_last = self._step, bucket.is_last()
        if self._in_turn:
            self._settle()
        newest = self._take_in(bucket)
        step.waiting.append(newest)
        if is_last and self._source is not None and self._is_attached:
            self._source.take()  # layers that this pass left out; checks
        # Rows of the newest bucket travel while backward() continues.
        on_its_way = newest.rows is not None and not is_last
        ready = step.waiting[:-1] if on_its_way else step.waiting
        for waiting in ready:
            self._unpack(waiting)
        begin = time.perf_counter()
        for block in self._layout.blocks:
            starts = self._starts[block]
            if step.grads.keys() >= starts and not step.filtered & starts:
                self._filter(block)
        step.seconds += time.perf_counter() - begin
        self._send(len(ready))
        if is_last:
            self._settle()
            self._end()
        return newest.result

    def _take_in(self, bucket: GradBucket) -> _Waiting:
        """Begin to gather a bucket's rows, if this step learns from them."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError(
                "a gradient is sparse, and a basis is dense: make its embedding with "
                "sparse=False"
            )
        devices: Any = None if buffer.device.type == "cpu" else [buffer.device]
        due = self._options.takes_samples(self._num_steps) and self._is_attached
        rows = (
            self._workers.begin_gather(buffer, "samples")
            if self._gathers and due
            else None
        )
        return _Waiting(bucket, Future(devices=devices), rows)

    def _unpack(self, waiting: _Waiting) -> None:
        """Find the gradients in a bucket, and the rows that belong to them."""
        bucket, step = waiting.bucket, self._step
        first = bucket.buffer().storage_offset()
        for p, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            slot = self._layout.slot_of.get(id(p))
            if slot is None or slot.start in step.grads:
                continue
            grad = step.grads[slot.start] = _laid_out_as(p, part)
            if waiting.rows is not None:
                rows, gathering = waiting.rows
                gathering.wait()
                own = rows.as_strided(
                    (len(rows), *grad.shape),
                    (rows.stride(0), *grad.stride()),
                    grad.storage_offset() - first,
                )
                step.rows[slot.start] = own.reshape(len(rows), -1)

    def _filter(self, block: Block) -> None:
        """Algorithm 1, lines 6, 8 and 9, for one block, in place in its buckets."""
        step, starts = self._step, sorted(self._starts[block])
        step.filtered.update(starts)
        if not self._is_attached:
            return
        tracker = self._tracker.by_name.get(block.name)
        grads = [step.grads[start] for start in starts]
        g = filtered = self._vector(grads)
        if tracker is not None and step.rows:
            G = torch.cat([step.rows[start] for start in starts], dim=1)
            tracker.update(G.to(g.dtype), self._options.sample_scale(1))
        strength = self._options.strength_at(self._num_steps)
        if tracker is not None and strength:
            filtered = tracker.project_out(g, strength)
            # One that is not finite stays as it is, for a GradScaler to see.
            filtered = torch.where(not_finite(g) == 0, filtered, g)
            _write_(grads, filtered)
        step.squares.append(torch.stack([norm_of(g), norm_of(filtered)]).square())

    def _vector(self, grads: Sequence[Tensor]) -> Tensor:
        """Gradients one after the other, in the precision of the basis."""
        return torch.cat([grad.reshape(-1) for grad in grads]).to(self._layout.dtype)

    def _send(self, ready: int) -> None:
        """Send the first buckets, as far as all of their blocks are filtered."""
        step, slot_of = self._step, self._layout.slot_of
        if self._exchange is not None:
            if len(step.filtered) == len(slot_of):
                self._send_whole(self._exchange)
            return
        for waiting in step.waiting[:ready]:
            slots = [slot_of.get(id(p)) for p in waiting.bucket.parameters()]
            if not all(slot is None or slot.start in step.filtered for slot in slots):
                break
            if self._in_turn:
                self._settle()
            sent = self._inner(waiting.bucket)
            step.sent.append((sent, waiting.result))
            step.waiting.remove(waiting)

    def _send_whole(self, exchange: Exchange) -> None:
        """Send the whole gradient as one message, and give DDP its average."""
        step, exchange.step = self._step, self._num_steps
        grads = [step.grads[slot.start] for slot in self._layout.slots]
        _write_(grads, exchange(self._vector(grads)))
        for waiting in step.waiting:
            waiting.result.set_result(waiting.bucket.buffer())

    def _settle(self) -> None:
        """Wait for all that the inner hook has begun to send."""
        for sent, result in self._step.sent:
            result.set_result(sent.wait())
        self._step.sent.clear()

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The tracker of each block: "all", or one per layer by the layer's name."""
        return dict(self._tracker.by_name)

    @property
    def stats(self) -> FilterStats:
        """What the last step did on this worker. Computed when asked for."""
        self._stats = self._stats or self._collected()
        return self._stats

    def _end(self) -> None:
        """Count a step whose last bucket is on its way."""
        self._last, self._step = self._step, _Step()
        self._last.waiting.clear()
        self._last.grads.clear()
        self._last.rows.clear()
        norms = self._last.norms
        if norms is not None and self._is_attached:
            # With workers as samples, the mean of the samples is no worker's gradient.
            is_mean = (
                self._options.loss_reduction == "mean" and self._source is not None
            )
            is_whole = len(self._tracker.by_name) == len(self._layout.blocks)
            self._averages.note(
                list(self._tracker.by_name.values()),
                norms,
                # How many samples a worker's gradient is of, the hook is not told.
                math.nan if self._source is None else self._source.samples_per_row,
                1.0 if is_mean and is_whole else math.nan,
                is_filtered=self._options.strength_at(self._num_steps) > 0,
            )
        self._num_steps, self._stats = self._num_steps + 1, None

    def _collected(self) -> FilterStats:
        trackers, last = list(self._tracker.by_name.values()), self._last
        norms, seconds = last.norms, last.seconds
        return collect_stats(trackers, self._num_steps, norms, seconds, self._averages)

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of one process, as ``GradientFilter.state_dict``; all must call it.

        With ``samples="per_sample"`` it is a synchronisation: bases become the leading
        part of their average, and so do memories of error feedback. The state of an
        inner hook is its own: save it too.

        Args:
            only: The one worker that gets the state. The others get an empty
                dictionary.
        """
        self._stats = self.stats  # a synchronisation forgets the last update
        if not self._gathers and self._workers.size > 1:
            for tracker in self._tracker.by_name.values():
                merge_bases(tracker, self._workers)
        if self._exchange is not None:
            self._exchange.share_memory()
        if only not in (None, self._workers.rank):
            return {}
        state = states.shapes_of(self._layout) | self._tracker.state_dict()
        state["num_steps"] = torch.tensor(self._num_steps)
        return state | states.stages(self._stages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, of any number of workers; others are refused."""
        states.check_model(self._layout, state)
        self._tracker.check_state(state)
        num_steps = states.count_in(state, "num_steps")
        # Whatever is refused is refused before anything is changed.
        states.load_stages(self._stages, state)
        self._tracker.load_state_dict(state)
        self._num_steps, self._stats, self._last = num_steps, None, _Step()
        self._averages.forget()
        if self._source is not None:
            self._source.discard()

    @property
    def _stages(self) -> list[Exchange]:
        return [] if self._exchange is None else [self._exchange]

    def detach(self) -> None:
        """Filter no more. DDP keeps its hook: the inner one sends what it gets."""
        self._is_attached = False
        self._handle.remove()
        if self._source is not None:
            self._source.detach()


def _is_compressor(inner: Any) -> TypeGuard[Compressor]:  # noqa: ANN401 (or a hook)
    return callable(inner) and hasattr(inner, "encode")


def _check(
    model: DistributedDataParallel,
    options: FilterOptions,
    inner: object,
    inner_state: object,
) -> None:
    """Refuse what does not go together, before anything is hooked."""
    name = communication_hook(model)
    if name is not None:
        raise ValueError(
            f"this DDP model has the communication hook {name!r}, and torch takes one: "
            f"wrap the module anew, and give {name!r} to the filter, "
            f"HookState(model, rank, inner={name}, inner_state=...)"
        )
    if not model.require_backward_grad_sync:
        raise ValueError(
            "DDP's communication is switched off, by no_sync() or a filter of "
            "dome.distributed.attach: call HookState outside, or detach() that filter"
        )
    if inner is not None and not (_is_compressor(inner) or callable(inner)):
        raise ValueError(
            f"inner must be a communication hook of torch or a compressor of "
            f"dome.compression, got {inner!r}"
        )
    if inner_state is not None and (inner is None or _is_compressor(inner)):
        raise ValueError(
            f"inner_state is the state of an inner hook, got one with inner={inner!r}: "
            f"leave it out, or name the hook that it belongs to"
        )
    if options.scaler is not None and _is_compressor(inner):
        raise ValueError(
            "a GradScaler lets gradients overflow now and then, which "
            f"{inner!r} cannot compress: train in bfloat16 without a scaler, or take "
            "an inner hook"
        )
    if options.stages:
        raise ValueError(
            f"after is {options.stages[-1]!r}, and a filtered gradient goes straight "
            f"to the inner hook: give inner=... what compresses, as a hook"
        )
    if options.direction_rank is not None:
        raise ValueError(
            "direction_rank is not supported in a communication hook, where bases of "
            "workers are brought together: leave it out, or use "
            "dome.distributed.attach"
        )


def _laid_out_as(p: Tensor, grad: Tensor) -> Tensor:
    """A gradient in a bucket with the strides that DDP writes it with."""
    # DDP keeps the strides of a parameter without gaps, such as of channels_last, and
    # shows what is in the bucket as if it were contiguous.
    pairs = list(zip(p.shape, p.stride(), strict=True))
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    if p.is_contiguous() or extent != p.numel():
        return grad
    return grad.as_strided(p.shape, p.stride())


def _write_(grads: Sequence[Tensor], vector: Tensor) -> None:
    """Write a vector into gradients that lie one after the other in it."""
    parts = vector.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view(grad.shape))
