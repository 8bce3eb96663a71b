"""The other workers: everything that is sent and received goes through here.

Every call is a collective of ``torch.distributed``: all workers must make it, in the
same order. Bytes are counted. Where one fails, the error says at what, and how torch
names the worker that is missing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dome.distributed.traffic import Traffic

# Newer versions of torch have other names for these two.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Workers:
    """P workers, this one among them.

    Args:
        group: Their process group.
        device: Where small tensors that travel are made.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic(self.rank, self.size)
        self._num_steps = 0

    def table(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all workers, each of the same number of integers."""
        self._num_steps += 1
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        everyone = mine.new_empty(self.size * len(mine))
        self.traffic.gathered("control", mine.nbytes)
        with self.waiting("the start of the step"):
            _all_gather(everyone, mine, group=self.group)
        rows: list[list[int]] = everyone.view(self.size, -1).tolist()
        return rows

    def exchange_words(self, words: dict[str, str]) -> list[dict[str, str]]:
        """The words of all workers, rank by rank; for once, at the beginning."""
        everyone: list[dict[str, str]] = [{} for _ in range(self.size)]
        with self.waiting("the comparison of options"):
            dist.all_gather_object(everyone, words, group=self.group)
        return everyone

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Small tensors, added up over workers: the same bits on each."""
        if not sums:
            return ()  # such as those of thin weights where none is thin
        flat = torch.cat([part.reshape(-1) for part in sums])
        self.add_up_(flat, "sums")
        parts = flat.split([part.numel() for part in sums])
        return tuple(p.view(s.shape) for p, s in zip(parts, sums, strict=True))

    def add_up_(self, tensor: Tensor, kind: str) -> None:
        """Add up a tensor over workers in place: the same bits on each."""
        self.traffic.all_reduced(kind, tensor.nbytes)
        with self.waiting(f"a sum of {kind}"):
            dist.all_reduce(tensor, group=self.group)

    def unite_(self, flags: Tensor) -> None:
        """Raise each of some bytes to the largest of all workers, in place."""
        self.traffic.all_reduced("control", flags.nbytes)
        with self.waiting("the entries that masks hold"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)

    def scatter_sum(self, tensor: Tensor, kind: str) -> Tensor:
        """Of the sum of tensors (P n, ...) over workers, this one's part (n, ...)."""
        part = tensor.new_empty(len(tensor) // self.size, *tensor.shape[1:])
        self.traffic.count(kind, (self.size - 1) * part.nbytes)
        with self.waiting(f"the scattered {kind}"):
            _reduce_scatter(part, tensor.contiguous(), group=self.group)
        return part

    def gather(self, tensor: Tensor, kind: str) -> Tensor:
        """Tensors (n, ...) of all workers, below each other, shape (P n, ...)."""
        tensor = tensor.contiguous()
        everyone = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        self.traffic.gathered(kind, tensor.nbytes)
        with self.waiting(f"the gathered {kind}"):
            _all_gather(everyone, tensor, group=self.group)
        return everyone

    def broadcast_(self, tensor: Tensor, kind: str) -> None:
        """Overwrite a tensor by that of the first worker."""
        self.traffic.passed_on(kind, tensor.nbytes)
        with self.waiting(f"the {kind} of the first worker"):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def agree_on(self, generator: torch.Generator | None) -> torch.Generator | None:
        """A generator in the state that it has on the first worker."""
        if generator is None:
            return None
        state = generator.get_state().to(self.device)
        self.broadcast_(state, "control")
        generator.set_state(state.cpu())
        return generator

    def exchange(
        self, parts: Sequence[Tensor], lengths: Sequence[int], kind: str
    ) -> Tensor:
        """Send each worker its part, and get one of each: all in one vector.

        Args:
            parts: What goes to each of the P workers.
            lengths: How many numbers come from each.
            kind: What they are for.
        """
        leaving = torch.cat([part.reshape(-1) for part in parts])
        others = leaving.numel() - parts[self.rank].numel()
        self.traffic.count(kind, others * leaving.itemsize)
        arriving = leaving.new_empty(sum(lengths))
        with self.waiting(f"the exchange of {kind}"):
            dist.all_to_all_single(
                arriving,
                leaving,
                list(lengths),
                [part.numel() for part in parts],
                group=self.group,
            )
        return arriving

    def deal(self, vector: Tensor, kind: str, group: dist.ProcessGroup) -> Tensor:
        """Send each worker its part of a vector (P n,), and get one of each, (P, n).

        In the place of a reduce-scatter of FSDP2, and counted as such.

        Args:
            vector: P equal parts.
            kind: What they are for.
            group: The workers, perhaps by another process group than this one's.
        """
        arriving = torch.empty_like(vector)
        self.traffic.reduced_by_fsdp(kind, vector.nbytes)
        with self.waiting(f"the exchange of {kind}"):
            dist.all_to_all_single(arriving, vector, group=group)
        return arriving.view(self.size, -1)

    def collect(
        self,
        tensor: Tensor,
        lengths: Sequence[int],
        kind: str,
        only: int | None = None,
    ) -> Tensor:
        """Tensors (n_p, ...) of all workers, below each other.

        Args:
            tensor: This worker's.
            lengths: n_p of every worker.
            kind: What they are for.
            only: The worker that gets them, the others get nothing; None for all.
        """
        # Collectives take equal shapes only.
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        if only is None:
            parts = list(self.gather(padded, kind).chunk(self.size))
        else:
            parts = self._gather_at(only, padded, kind)
        kept = [part[:n] for part, n in zip(parts, lengths, strict=False)]
        return torch.cat(kept) if kept else tensor[:0]

    def _gather_at(self, worker: int, tensor: Tensor, kind: str) -> list[Tensor]:
        chosen = worker == self.rank
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if chosen else None
        self.traffic.count(kind, 0 if chosen else tensor.nbytes)
        with self.waiting(f"the gathered {kind}"):
            dist.gather(tensor, parts, group=self.group, group_dst=worker)
        return parts or []

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say which collective of which step failed, and how to see who is missing."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} gave up at {what} "
                f"({self._num_steps} steps begun): another rank ended, raised an "
                f"error, or hangs. "
                f"torchrun says which one ended. torch names one that hangs if you "
                f"call torch.distributed.monitored_barrier(timeout=...) before each "
                f"step (gloo), or read its flight recorder (NCCL). torch says: {error}"
            ) from error
