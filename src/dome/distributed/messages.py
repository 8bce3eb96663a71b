"""DDP with a compressor: every worker filters its own gradient, and sends a message.

Letters: D parameters, K directions, P workers. A sketch of a gradient has noise in
proportion to the gradient's norm, so the filter must run before it, on each worker's
own gradient, with a basis of D K numbers on every worker. Only messages travel.

Messages of linear compressors are summed on the way; others are gathered and decoded
one after the other in the order of workers. Either way all workers decode the same
bytes in the same order, and so hold the same bits. PowerSGD takes two sums a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dome.compression import Compressor, ErrorFeedback, Message, PowerSGD
from dome.distributed.handshake import Handshake, shake_hands
from dome.distributed.local import LocalGradients
from dome.distributed.merging import check_mergeable, merge_bases
from dome.distributed.workers import Workers
from dome.options import Downstream, FilterOptions
from dome.parameters import Layout
from dome.torch_private import own_arithmetic
from dome.trackers.blocks import Samples
from dome.world import Alone, Attached, State

SUM = "the sum of the messages of all ranks"


class Messages:
    """The world of a DDP model whose workers each have a basis, and send messages.

    Args:
        model: The DDP model; its own communication is off from now on.
        layout: Its parameters that are filtered.
        options: What the filter does; ``after`` comes before compression.
        workers: The P workers.
        compressor: Every worker's own, made alike.
        every: After how many steps all get the leading part of their averaged
            covariance, at the bytes of an all-reduce of D K numbers; 0 for never.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        layout: Layout,
        options: FilterOptions,
        workers: Workers,
        compressor: Compressor,
        every: int,
    ) -> None:
        self._exchange = Exchange(compressor, workers, layout)
        stages: tuple[Downstream, ...] = (*options.stages, self._exchange)
        self._alone = alone = Alone(
            model.module, layout, replace(options, after=stages)
        )
        self.layout, self.options = layout, alone.options
        self.source, self.tracker, self.masks = alone.source, alone.tracker, alone.masks
        for tracker in self.tracker.by_name.values() if every else ():
            check_mergeable(tracker, workers.size)
        # The first step that shares bases comes after `every` others.
        self._local = LocalGradients(model, workers, layout, every + 1)
        self.attached: Sequence[Attached] = (*alone.attached, self._local)
        self.gradient, self.total, self.zeros = alone.gradient, alone.total, alone.zeros
        self.held, self.stats = alone.held, workers.stats
        self._workers, self._every = workers, every

    def meet(self, step: int, own: Samples | None) -> tuple[Samples | None, float]:
        """This worker's own samples."""
        self._local.begin_step()
        self._exchange.step = step
        if self._every and step and step % self._every == 0:
            self.share_bases()
        return self._alone.meet(step, own)

    def put_(self, filtered: Tensor) -> None:
        """Send the filtered gradient, write the average into ``.grad``."""
        self._alone.put_(filtered)
        self._local.end_step()

    def state(self, whole: bool, only: int | None) -> State | None:
        """The state of one process, once bases and error feedback are shared."""
        self.share_bases()
        self._exchange.share_memory()
        if only not in (None, self._workers.rank):
            return None
        return self._alone.state(whole, only)

    def share_bases(self) -> None:
        """Give every worker the leading part of the averaged covariance."""
        if self._workers.size > 1:
            for tracker in self.tracker.by_name.values():
                merge_bases(tracker, self._workers)


class Exchange:
    """The last stage behind a worker's own filter: g of this worker → average of all.

    Args:
        compressor: What gradients are compressed with; every worker has its own.
        workers: The other workers.
        layout: Parameters that get a ``.grad`` here if they have one elsewhere.
    """

    def __init__(
        self, compressor: Compressor, workers: Workers, layout: Layout | None = None
    ) -> None:
        self._compressor, self._workers, self._layout = compressor, workers, layout
        if hasattr(compressor, "set_worker"):
            compressor.set_worker(workers.rank)
        self.step = 0  # that workers are at

    def __repr__(self) -> str:
        return f"Exchange({self._compressor!r})"

    @own_arithmetic
    def __call__(self, vector: Tensor) -> Tensor:
        """The average over workers of what arrives of their vectors (D,)."""
        inner = _inside(self._compressor)
        if isinstance(inner, PowerSGD):
            return self._in_two_sums(vector, inner)
        message = self._begin(lambda: self._compressor.encode(vector))
        if self._compressor.is_linear:
            total = self._summed(message)
            with self._received(SUM):
                return self._compressor.decode(total) / self._workers.size
        payloads = self._workers.gather(message.payload, "messages")
        arrived = torch.zeros_like(vector)
        for rank, payload in enumerate(payloads.chunk(self._workers.size)):
            with self._received(f"the message of rank {rank}"):
                arrived += self._compressor.decode(Message(payload.clone()))
        return arrived / self._workers.size

    def _in_two_sums(self, vector: Tensor, inner: PowerSGD) -> Tensor:
        """PowerSGD of the average: workers share P and Q, as in its paper."""
        feedback = self._compressor
        carried = vector
        if isinstance(feedback, ErrorFeedback):
            carried = feedback.carried(vector)
        left = self._summed(self._begin(lambda: inner.encode_left(carried)))
        with self._received(SUM):
            right = inner.encode_right(left)
        right = self._summed(right)
        with self._received(SUM):
            average = inner.decode_right(right) / self._workers.size
        if isinstance(feedback, ErrorFeedback):
            feedback.remember(carried - average)
        return average

    def _summed(self, message: Message) -> Message:
        """The message of the sum over workers, from a linear one of each."""
        numbers = message.numbers
        self._workers.add_up_(numbers, "messages")
        return message.with_numbers(numbers)

    def _begin(self, encode: Callable[[], Message]) -> Message:
        """This worker's message; raises on every worker if one cannot make its own."""
        message, problem = None, None
        try:
            message = encode()
        except ValueError as error:
            problem = error
        mine = Handshake(self.step, refused=message is None)
        everyone = shake_hands(self._workers, mine, self._layout)
        refusing = [rank for rank, other in enumerate(everyone) if other.refused]
        if message is None or refusing:
            names = " and ".join(f"rank {rank}" for rank in refusing)
            raise ValueError(
                f"the gradient of {names} cannot be compressed"
                + (f": {problem}" if problem else "; its own error says why")
            ) from problem
        return message

    @contextmanager
    def _received(self, what: str) -> Iterator[None]:
        """Say whose message it was that could not be read, and who read it."""
        try:
            yield
        except ValueError as error:
            raise ValueError(
                f"{what} cannot be read by rank {self._workers.rank}: {error}"
            ) from error

    def share_memory(self) -> None:
        """Give every worker the average of their error-feedback memories.

        What is still to be sent, summed over workers, stays the same.
        """
        feedback = self._compressor
        if isinstance(feedback, ErrorFeedback) and feedback.error is not None:
            error = feedback.error.clone()
            self._workers.add_up_(error, "basis")
            feedback.remember(error / self._workers.size)

    def state_dict(self) -> dict[str, Tensor]:
        """The compressor's own."""
        return self._compressor.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The compressor's own."""
        self._compressor.load_state_dict(state)


def _inside(compressor: Compressor) -> Compressor:
    """A compressor without its error feedback."""
    if isinstance(compressor, ErrorFeedback):
        return compressor.compressor
    return compressor
