"""The communication of ``fully_shard``, with every worker's gradient in sight.

Letters: P workers, m numbers that a module reduces for each of them. At the end of a
module's backward pass FSDP2 adds the workers' gradients up and leaves each worker its
part of the sum, a reduce-scatter. An all-to-all and a sum on the spot send the same
bytes and give the same sum, and on the way each worker sees a row of all others, (P,
m): the samples that a tracker split over workers takes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dome.distributed.worker_rows import WorkerRows
from dome.distributed.workers import Workers
from dome.torch_private import fsdp_communication, fsdp_groups

Comm = Any  # what torch calls a ReduceScatter or an AllGather: allocate and a call


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that ``fully_shard`` was called for."""
    # By name: importing it takes longer than all of dome.
    return [
        module
        for module in model.modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    ]


class AllToAll:
    """A reduce-scatter for one module of FSDP2 that shows the rows it adds up.

    It takes the place of the module's own until ``detach()``.

    Args:
        module: A module that ``fully_shard`` was called for, with parameters.
        rows: Where the workers' gradients go.
        workers: The P workers.
    """

    def __init__(self, module: Any, rows: WorkerRows, workers: Workers) -> None:  # noqa: ANN401
        self._module, self._rows, self._workers = module, rows, workers
        (self._group,) = fsdp_groups(module)
        # FSDP2's own, which allocates, and reduces where no rows are wanted.
        self._plain, self._all_gather = fsdp_communication(self._group)
        self._factor = self._group.gradient_divide_factor
        self._sums = self._group.force_sum_reduction_for_comms
        self._divide_by = workers.size if self._factor is None else self._factor
        self._is_input = False
        module.set_custom_reduce_scatter(self)
        module.set_custom_all_gather(NamedAllGather(self._all_gather, workers))
        if workers.size > 1:
            # Rows come as they are and sums are divided here: FSDP2 divides some of it
            # before it sends and some after, as suits the precision.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def detach(self) -> None:
        """Let FSDP2 communicate by itself again."""
        self._module.set_custom_reduce_scatter(self._plain)
        self._module.set_custom_all_gather(self._all_gather)
        self._module.set_gradient_divide_factor(self._factor)
        self._module.set_force_sum_reduction_for_comms(self._sums)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Room for what is reduced, and in the next call for the result."""
        buffer: Tensor = self._plain.allocate(size, dtype=dtype, device=device)
        self._is_input = not self._is_input
        # FSDP2 may do without a call where there is one worker: it copies.
        if self._workers.size == 1 and self._is_input and self._rows.is_armed:
            self._rows.show(buffer.view(1, -1))
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 (a ReduceOp of either of two types)
        async_op: bool = False,
    ) -> None:
        """The average of all workers' gradients (P m,), this one's part of it (m,)."""
        del async_op  # FSDP2 orders what follows by streams
        if self._workers.size == 1:
            output_tensor.copy_(input_tensor)
            return
        if self._group.gradient_divide_factor != 1.0:
            raise RuntimeError(
                "set_gradient_divide_factor was called while a filter is attached, "
                "which divides by the factor set before: call it before attach"
            )
        if not self._rows.is_armed:
            num_bytes, what = input_tensor.nbytes, "the reduced gradient"
            with self._workers.reducing(num_bytes, "gradient", what):
                self._plain(
                    output_tensor, input_tensor.div_(self._divide_by), group, op
                )
            return
        rows = self._workers.deal(input_tensor, "samples", group)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        output_tensor.copy_(rows.sum(dim=0, dtype=dtype).div_(self._divide_by))
        self._rows.show(rows)


class NamedAllGather:
    """FSDP2's all-gather, whose error says at what this worker gave up.

    Args:
        plain: FSDP2's own.
        workers: The P workers.
    """

    def __init__(self, plain: Comm, workers: Workers) -> None:
        self._plain, self._workers = plain, workers
        self.allocate = plain.allocate

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        """The parameters of all workers."""
        with self._workers.sending(0, "control", "the gathered parameters"):
            return self._plain(*arguments, **named)
