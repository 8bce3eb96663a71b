"""Every worker's gradient as a sample, as ``fully_shard`` reduces them.

Letters: P workers, n of the D numbers of the gradient held by a worker, m numbers that
a module reduces for each worker. Modules are reduced one after the other, each with all
of its parameters at once (see ``reduce_scatter.py``).
"""

import math
from typing import NoReturn

import torch
from torch import Tensor, nn

from dome.distributed.placement import Placement, chunk_length
from dome.distributed.workers import Workers
from dome.parameters import Layout
from dome.samples.micro_batch import num_samples_in
from dome.samples.store.gradients import Gradients
from dome.samples.tracing.nested import Value
from dome.torch_private import current_graph_task, when_backward_ends


class WorkerRows:
    """P rows for each backward pass that reduces gradients, until they are taken.

    Args:
        model: The model, of which all trained parameters are watched.
        layout: The tracked parameters.
        placement: Where these lie among the numbers held here.
        workers: The P workers.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, placement: Placement, workers: Workers
    ) -> None:
        self._size, self._placement = workers.size, placement
        self._columns = {
            id(p): columns
            for p, columns in zip(layout.parameters, placement.columns, strict=True)
        }
        self.is_armed = True  # whether rows are kept of backward passes from now on
        self._buffer = torch.empty(
            0, placement.num_held, dtype=layout.dtype, device=layout.device
        )
        self._num_passes = 0
        self._first_kept = 0  # passes before it were thrown away by zero_grad()
        self._backward = -1
        self._gradients = Gradients(layout.parameters)
        # What has arrived for the module that is reduced now, and how much of it was
        # given to its parameters.
        self._arrived: Tensor | None = None
        self._num_given = 0
        trained = [p for p in model.parameters() if p.requires_grad]
        self._handles = [
            p.register_post_accumulate_grad_hook(self._give) for p in trained
        ]
        self.samples_per_row = math.nan  # of this worker's last pass
        counted = model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._handles.append(counted)

    def _count(self, _: nn.Module, args: Value, kwargs: Value) -> None:
        if torch.is_grad_enabled():
            self.samples_per_row = num_samples_in((args, kwargs))

    @property
    def num_kept(self) -> int:
        """Passes whose gradients are in ``.grad``, as far as this worker can tell."""
        return self._num_passes - self._first_kept

    @property
    def came_without(self) -> bool:
        """Whether gradients are there that were not reduced through here."""
        if not self.is_armed or self._num_passes or self._gradients.are_as_noted:
            return False
        return bool(self._placement.gather().any())

    def arm(self, active: bool) -> None:
        """Choose whether rows are kept of backward passes from now on."""
        self.is_armed = active

    def take(self, due: bool = True) -> Tensor | None:
        """None: workers first agree on how many passes there were, see ``newest``."""
        del due
        return None

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            "with fully_shard a sample is the gradient that a worker sends, and no "
            "call of the model is captured: leave out watch(), paused() and "
            "expect_backward()"
        )

    watch = expect = paused = _refuse  # of SampleSource

    def newest(self, num_passes: int) -> Tensor | None:
        """The rows of so many passes, the newest, shape (P · passes, n)."""
        self._check_given()
        stop = self._num_passes * self._size
        start = stop - num_passes * self._size
        self.discard()
        return self._buffer[start:stop] if num_passes else None

    def discard(self) -> None:
        """Forget what was captured since the last ``newest()``."""
        self._num_passes = self._first_kept = 0
        self._arrived = None
        self._gradients.note()

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def show(self, rows: Tensor) -> None:
        """Rows (P, m) of the parameters that FSDP2 gives their gradients next."""
        if rows.device != self._buffer.device:
            raise RuntimeError(
                f"gradients are reduced on {rows.device} and parameters lie on "
                f"{self._buffer.device}: a filter with CPUOffloadPolicy is not "
                f"supported, shard without it"
            )
        self._check_given()
        self._begin_pass()
        self._arrived, self._num_given = rows, 0

    def _begin_pass(self) -> None:
        """Make room for the rows of a backward pass that has just begun."""
        if self._backward == current_graph_task() and self._num_passes:
            return
        self._backward = current_graph_task()
        if self._num_passes and self._was_zeroed():
            self._first_kept = self._num_passes
        size = self._size
        start, stop = self._num_passes * size, (self._num_passes + 1) * size
        if len(self._buffer) < stop:
            more = self._buffer.new_empty(size, self._buffer.shape[1])
            self._buffer = torch.cat([self._buffer, more])
        self._buffer[start:stop] = 0  # parameters that this pass leaves out
        self._num_passes += 1
        when_backward_ends(self._gradients.note)

    def _was_zeroed(self) -> bool:
        """Whether ``.grad`` holds nothing any more of the passes so far."""
        if self._gradients.are_missing:
            return True
        written = self._gradients.may_be_zeroed
        return written and not bool(self._placement.gather().any())

    def _give(self, p: Tensor) -> None:
        """FSDP2 has given a parameter its gradient: the next ones of the rows are its.

        A module's parameters come in the order in which they lie in what was reduced.
        """
        if self._arrived is None:
            return  # a gradient that was not reduced, such as that of a penalty
        first = self._num_given
        self._num_given += chunk_length(p.shape, self._size)
        columns = self._columns.get(id(p))
        if columns is not None:
            num = columns.stop - columns.start
            mine = self._arrived[:, first : first + num]
            stop = self._num_passes * self._size
            # A module that was called twice is reduced twice in one pass.
            self._buffer[stop - self._size : stop, columns] += mine
        if self._num_given >= self._arrived.shape[1]:
            self._check_given()

    def _check_given(self) -> None:
        """Refuse rows that were not given to parameters to the last number."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None and self._num_given != arrived.shape[1]:
            raise RuntimeError(
                f"fully_shard reduced {arrived.shape[1]} numbers per worker, but the "
                "parameters that were trained when the filter was attached have "
                f"{self._num_given}: attach again after freezing or unfreezing"
            )
