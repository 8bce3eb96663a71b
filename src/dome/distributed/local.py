"""DDP without its own communication: gradients stay those of the worker.

DDP averages gradients during ``backward()``, and now and then talks during
``forward()`` too (buffers, the order of its buckets). A worker without samples at a
step makes neither call, and the others would wait for it. So while a filter is
attached, DDP is in the state of its ``no_sync()`` all the time, and what it would have
sent is sent in the filter's own step: gradients, and the buffers of the first worker.
"""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dome.distributed.workers import Workers
from dome.parameters import Layout
from dome.torch_private import communication_hook, own_arithmetic


class LocalGradients:
    """Keeps the gradients of a DDP model local, from now until ``detach()``.

    Args:
        model: The DDP model.
        workers: Its workers.
        layout: The parameters whose gradients are sent.
        cycle: After how many steps everything has been sent that is not sent in each.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        workers: Workers,
        layout: Layout,
        cycle: int,
    ) -> None:
        self._model, self._workers, self._cycle = model, workers, cycle
        self._num_bytes = layout.dim * layout.dtype.itemsize
        self._switch(False)

    def detach(self) -> None:
        """Let DDP average gradients again."""
        self._switch(True)

    def begin_step(self) -> None:
        """Refuse a communication hook that came since; count bytes from here on."""
        check_no_hook(self._model)
        self._workers.begin_step()
        self._workers.count_plain(self._workers.ring(self._num_bytes))

    def end_step(self) -> None:
        """Send buffers where DDP would; tell once if a cycle of steps was expensive."""
        self._send_buffers()
        self._workers.tell_cost(self._cycle)

    def _switch(self, on: bool) -> None:
        self._model.require_backward_grad_sync = on
        self._model.require_forward_param_sync = on

    @own_arithmetic
    def _send_buffers(self) -> None:
        """Give all workers the buffers of the first, where DDP would do so."""
        model = self._model
        old_name = getattr(model, "broadcast_buffers", True)
        if self._workers.size == 1 or not getattr(
            model, "forward_sync_buffers", old_name
        ):
            return
        buffers = sorted(model.modules_buffers, key=lambda buffer: str(buffer.dtype))
        for _, group in groupby(buffers, key=lambda buffer: buffer.dtype):
            self._send(list(group))

    def _send(self, buffers: list[Tensor]) -> None:
        """Those of one dtype, in one go."""
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self._workers.broadcast_(flat, "buffers")
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def check_switchable(model: DistributedDataParallel) -> None:
    """Refuse a DDP model whose communication cannot be switched off."""
    if model.static_graph:
        raise ValueError(
            "this DDP model has static_graph=True, so it always averages the "
            "gradients of its first backward pass: wrap the module without it"
        )
    check_no_hook(model)


def check_no_hook(model: DistributedDataParallel) -> None:
    """Refuse a DDP model with a communication hook: DDP sends nothing that it sees."""
    name = communication_hook(model)
    if name is not None:
        raise ValueError(
            f"this DDP model has the communication hook {name!r}, which would not run: "
            "a filter sends gradients itself. Wrap the module without it. To have "
            "both, model.register_comm_hook(dome.distributed.HookState(model, rank, "
            f"inner={name}, inner_state=...), dome.distributed.hook)"
        )
