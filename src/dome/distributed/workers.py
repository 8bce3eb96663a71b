"""The other workers: everything that is sent and received goes through here.

Every call is a collective of ``torch.distributed``: all workers must make it, in the
same order. Where one fails, the error says at what, and how torch names the worker that
is missing.

Bytes that this worker sends are counted. A ring all-reduce of n bytes sends
2 (P − 1)/P n from every worker, an all-gather of n bytes a worker (P − 1) n, an
all-to-all all but a worker's own part, a reduce-scatter (P − 1)/P n, and a broadcast n
from all but the last. Frames of the network below are not counted.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from dome.diagnostics import FilterStats
from dome.distributed.traffic import KINDS, WAYS_OUT, DistributedStats

MOST_BYTES = 2.0  # of DDP's: more is told of

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
        self._num_steps = 0
        self._sent: Counter[str] = Counter()  # in this step
        self._plain = 0  # what would have been sent in this step without a filter
        self._total = self._total_plain = 0
        self.is_over = True  # the step that was counted last
        # Of the first steps: how many, what they sent, and what DDP would have.
        self._num_begun, self._begun_plain = 0, 0
        self._begun: Counter[str] = Counter()

    def begin_step(self) -> None:
        """Start to count anew what a step sends."""
        self._sent.clear()
        self._plain, self.is_over = 0, False

    def count_plain(self, num_bytes: int) -> None:
        """Count bytes that this worker would have sent without a filter."""
        self._plain += num_bytes
        self._total_plain += num_bytes

    def tell_cost(self, num_steps: int) -> None:
        """Warn once, after some steps, if they sent more than twice what DDP would."""
        if self._num_begun == num_steps:
            return
        self._num_begun += 1
        self._begun.update(self._sent)
        self._begun_plain += self._plain
        num_bytes = self._begun.total()
        if (
            self._num_begun < num_steps
            or self.rank > 0
            or num_bytes <= MOST_BYTES * self._begun_plain
        ):
            return
        kind, most = self._begun.most_common(1)[0]
        steps = "the first step" if num_steps == 1 else f"the first {num_steps} steps"
        warnings.warn(
            f"in {steps} each worker sent {num_bytes / self._begun_plain:.1f} times "
            f"the bytes of DDP, {most / num_bytes:.0%} for {kind}: {WAYS_OUT[kind]}",
            stacklevel=2,
        )

    def ring(self, num_bytes: int) -> int:
        """Bytes that each worker sends in a ring all-reduce: 2 (P − 1)/P of them."""
        return -(-2 * (self.size - 1) * num_bytes // self.size)

    def stats(self, base: FilterStats) -> DistributedStats:
        """The record of a step, with the bytes of it."""
        sent = {kind: self._sent[kind] for kind in KINDS}
        return DistributedStats(
            **asdict(base),
            worker=self.rank,
            num_workers=self.size,
            sent=MappingProxyType(sent),
            bytes_sent=sum(sent.values()),
            total_bytes_sent=self._total,
            ddp_bytes=self._plain,
            total_ddp_bytes=self._total_plain,
        )

    def table(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all workers, each of the same number of integers."""
        self._num_steps += 1
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        everyone = mine.new_empty(self.size * len(mine))
        num_bytes = (self.size - 1) * mine.nbytes
        with self.sending(num_bytes, "control", "the start of the step"):
            _all_gather(everyone, mine, group=self.group)
        rows: list[list[int]] = everyone.view(self.size, -1).tolist()
        return rows

    def exchange_words(self, words: dict[str, str]) -> list[dict[str, str]]:
        """The words of all workers, rank by rank; for once, at the beginning."""
        everyone: list[dict[str, str]] = [{} for _ in range(self.size)]
        with self.sending(0, "control", "the comparison of options"):
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
        with self.sending(self.ring(tensor.nbytes), kind, f"a sum of {kind}"):
            dist.all_reduce(tensor, group=self.group)

    def unite_(self, flags: Tensor) -> None:
        """Raise each of some bytes to the largest of all workers, in place."""
        num_bytes = self.ring(flags.nbytes)
        with self.sending(num_bytes, "control", "the entries that masks hold"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)

    def scatter_sum(self, tensor: Tensor, kind: str) -> Tensor:
        """Of the sum of tensors (P n, ...) over workers, this one's part (n, ...)."""
        part = tensor.new_empty(len(tensor) // self.size, *tensor.shape[1:])
        num_bytes = (self.size - 1) * part.nbytes
        with self.sending(num_bytes, kind, f"the scattered {kind}"):
            _reduce_scatter(part, tensor.contiguous(), group=self.group)
        return part

    def gather(self, tensor: Tensor, kind: str) -> Tensor:
        """Tensors (n, ...) of all workers, below each other, shape (P n, ...)."""
        tensor = tensor.contiguous()
        everyone = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        num_bytes = (self.size - 1) * tensor.nbytes
        with self.sending(num_bytes, kind, f"the gathered {kind}"):
            _all_gather(everyone, tensor, group=self.group)
        return everyone

    def begin_gather(self, tensor: Tensor, kind: str) -> tuple[Tensor, dist.Work]:
        """Begin to gather tensors (n,) of all workers as rows (P, n)."""
        everyone = tensor.new_empty(self.size * len(tensor))
        num_bytes = (self.size - 1) * tensor.nbytes
        with self.sending(num_bytes, kind, f"the gathered {kind}"):
            work = _all_gather(everyone, tensor, group=self.group, async_op=True)
        return everyone.view(self.size, -1), work

    def broadcast_(self, tensor: Tensor, kind: str) -> None:
        """Overwrite a tensor by that of the first worker."""
        num_bytes = 0 if self.rank == self.size - 1 else tensor.nbytes
        with self.sending(num_bytes, kind, f"the {kind} of the first worker"):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def agree_on(self, generator: torch.Generator | None) -> None:
        """Bring a generator to the state that it has on the first worker."""
        if generator is not None:
            state = generator.get_state().to(self.device)
            self.broadcast_(state, "control")
            generator.set_state(state.cpu())

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
        arriving = leaving.new_empty(sum(lengths))
        num_bytes = others * leaving.itemsize
        with self.sending(num_bytes, kind, f"the exchange of {kind}"):
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
        with self.reducing(vector.nbytes, kind, f"the exchange of {kind}"):
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
        num_bytes = 0 if chosen else tensor.nbytes
        with self.sending(num_bytes, kind, f"the gathered {kind}"):
            dist.gather(tensor, parts, group=self.group, group_dst=worker)
        return parts or []

    @contextmanager
    def reducing(self, num_bytes: int, kind: str, what: str) -> Iterator[None]:
        """Send a part of the gradient in the place of a reduce-scatter of FSDP2."""
        if self.is_over:
            self.begin_step()  # in backward(), before optimizer.step()
        num_bytes = (self.size - 1) * num_bytes // self.size
        self.count_plain(num_bytes)
        with self.sending(num_bytes, kind, what):
            yield

    @contextmanager
    def sending(self, num_bytes: int, kind: str, what: str) -> Iterator[None]:
        """Count bytes; say at what a collective failed, and how to see who is missing.

        Args:
            num_bytes: Sent by this worker.
            kind: What they are for.
            what: The collective, in words.
        """
        self._sent[kind] += num_bytes
        self._total += num_bytes
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
