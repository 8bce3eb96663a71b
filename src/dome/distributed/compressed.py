"""The filter over workers with compression: every worker filters, then encodes.

Letters: D parameters, K directions, P workers. A sketch of a gradient has noise in
proportion to the gradient's norm, so the filter must run before it, on each worker's
own gradient, with a basis of D K numbers on every worker. Only messages travel.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dome.compression import Compressor
from dome.diagnostics import FilterStats
from dome.distributed.exchange import Exchange
from dome.distributed.handshake import (
    check_same_options,
    refuse_directions,
    refuse_stream,
)
from dome.distributed.local import LocalGradients, check_switchable
from dome.distributed.merging import check_mergeable, merge_bases
from dome.distributed.sharded import source_named
from dome.distributed.traffic import DistributedStats
from dome.distributed.workers import Workers
from dome.filter import GradientFilter
from dome.hooking import Hooked
from dome.options import Downstream, FilterOptions
from dome.parameters import Layout
from dome.trackers import Tracker


class CompressedFilter(Hooked):
    """A ``GradientFilter`` on every worker, and messages of a compressor between them.

    All workers must call ``step()``, ``state_dict()`` and ``load_state_dict()``
    together. Until ``step()`` a worker's ``.grad`` is its own; then it is the average
    of what arrived from all, the same bits on each.

    Args:
        model: The DDP model; its own communication is off from now on.
        rank: Number of directions K, or numbers by layer.
        compressor: Every worker's own, made alike.
        samples: "per_sample", or "worker": the micro-batches of a step, of which a
            worker needs at least two.
        share: "own", a basis for each worker from its own samples; or a number n: every
            n steps all get the leading part of their averaged covariance, at the bytes
            of an all-reduce of D K numbers.
        after: What a worker's filtered gradient goes through before it is compressed.
        parameters: Filter only those of the model's parameters that are among these.
        **options: Those of ``GradientFilter``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        rank: int | Mapping[str, int],
        compressor: Compressor,
        *,
        samples: str = "per_sample",
        share: str | int = "own",
        after: Downstream | Sequence[Downstream] = (),
        parameters: Iterable[Tensor] | None = None,
        **options: Any,  # noqa: ANN401 (GradientFilter names and checks them)
    ) -> None:
        super().__init__()
        source = source_named(samples)
        check_switchable(model)
        self._every = _check_share(share)
        parameters = None if parameters is None else list(parameters)
        layout = Layout(model.module, only=parameters)
        self._gradient_bytes = layout.dim * layout.dtype.itemsize
        self._workers = Workers(model.process_group, layout.device)
        options |= {"rank": rank, "samples": source, "after": after}
        checked = FilterOptions.named("dome.distributed.attach", options)
        refuse_directions(checked)
        refuse_stream(checked)
        check_same_options(
            self._workers, checked, layout, compressor=compressor, share=share
        )
        self._exchange = Exchange(compressor, self._workers, layout)
        options["after"] = (*checked.stages, self._exchange)
        self._filter = GradientFilter(model.module, parameters=parameters, **options)
        if self._every:
            for tracker in self.trackers.values():
                check_mergeable(tracker, self._workers.size)
        self._local = LocalGradients(model, self._workers)
        self._num_steps = 0
        self._stats: FilterStats | None = None

    def step(self) -> None:
        """Filter this worker's gradient, send it, put the average in ``.grad``."""
        self._local.check()
        self._workers.traffic.begin_step()
        self._workers.traffic.reduced_by_ddp(self._gradient_bytes)
        if self._every and self._num_steps and self._num_steps % self._every == 0:
            self._share()
        self._stats = None
        self._filter.step()
        self._local.send_buffers()
        self._num_steps += 1

    def detach(self) -> None:
        """Remove every hook; DDP averages gradients again. Can be called twice."""
        self._filter.detach()
        self._local.release()
        super().detach()

    @property
    def trackers(self) -> dict[str, Tracker]:
        """This worker's tracker of each block."""
        return self._filter.trackers

    @property
    def stats(self) -> DistributedStats:
        """What the last step did and sent. Computed when asked for, by any worker."""
        base = self._filter.stats if self._stats is None else self._stats
        return self._workers.traffic.stats(base)

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of a ``GradientFilter`` in one process, whatever P is.

        All workers must call it. It is a synchronisation: bases become the leading part
        of their average, memories of error feedback their average, on every worker, so
        that the run that goes on and one that resumes, on any number of workers, are
        the same. With ``only``, the other workers get an empty dictionary.
        """
        self._stats = self._filter.stats  # loading a basis forgets the last update
        self._share()
        self._exchange.share_memory()
        whole = only in (None, self._workers.rank)
        return self._filter.state_dict() if whole else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, of any number of workers or of one process."""
        self._filter.load_state_dict(state)
        self._num_steps = int(state["num_steps"])
        self._exchange.go_on_at(self._num_steps)
        self._stats = None

    def _share(self) -> None:
        if self._workers.size > 1:
            for tracker in self.trackers.values():
                merge_bases(tracker, self._workers)


def _check_share(share: str | int) -> int:
    """The number of steps between synchronisations, 0 for none."""
    if share == "own":
        return 0
    if not isinstance(share, int) or isinstance(share, bool) or share < 1:
        raise ValueError(
            f'share must be "own" (a basis for each worker) or a number of steps '
            f"between synchronisations, got {share!r}"
        )
    return share
