"""PowerSGD: each weight matrix as a product of two thin ones.

Vogels, Karimireddy & Jaggi, PowerSGD, NeurIPS 2019. A parameter's gradient M (n, m),
with all but its first dimension flattened into m, is sent as P (n, r) and Q (m, r) by
one step of the power method from the Q of the step before:

    P = orthonormal(M Q₋₁),    Q = Mᵀ P,    C(M) = P Qᵀ

Parameters of one dimension, and matrices that this would not make smaller, are sent
whole. Biased: use it inside ``ErrorFeedback``.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dome.compression.codec import Codec
from dome.compression.low_rank import low_rank
from dome.compression.message import Message, check_number_dtype, read, written
from dome.compression.noise import DEFAULT_SEED
from dome.compression.packing import Part
from dome.compression.vector import check_recovered, check_shape
from dome.parameters import Layout
from dome.torch_private import own_arithmetic


@dataclass(frozen=True, slots=True)
class Begun:
    """A step in two phases that has begun.

    Attributes:
        vector: This worker's, shape (D,).
        step: Its number.
        left: P of the sum of all vectors, once that is known.
        rest: What is in no matrix, of the sum.
    """

    vector: Tensor
    step: int
    left: Tensor | None = None
    rest: Tensor | None = None


class PowerSGD(Codec):
    """Sends r (n + m) numbers for each matrix (n, m), and everything else whole.

    There are two ways to use it. ``encode`` gives one message of P and Q; it is not
    linear: P and Q of a sum are not the sums. Workers can instead share P and Q, as in
    the paper, in two sums of linear messages a step, of the same numbers together:

        left = compressor.encode_left(vector)            # M Q₋₁ and the rest; sum it
        right = compressor.encode_right(sum_of_lefts)    # Mᵀ P; sum it
        total = compressor.decode_right(sum_of_rights)   # P Qᵀ, of the summed vectors

    All workers then hold the same Q. O(D r).

    Args:
        shapes: Shapes of the parameters in the order of the flat gradient, or a model's
            ``Layout``.
        rank: r.
        seed: Of the first Q; must be the same on all workers for the two sums.
        value_dtype: What numbers are sent in: torch.float32, float64 or bfloat16.
    """

    def __init__(
        self,
        shapes: Iterable[Sequence[int]] | Layout,
        rank: int = 2,
        *,
        seed: int = DEFAULT_SEED,
        value_dtype: torch.dtype = torch.float32,
    ) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        check_number_dtype(value_dtype)
        if isinstance(shapes, Layout):
            shapes = [slot.shape for slot in shapes.slots]
        shapes = [tuple(shape) for shape in shapes]
        # The seed too: workers agree on P and Q only if they began with the same Q.
        packed = zlib.crc32(str(shapes).encode())
        super().__init__(
            f"PowerSGD(rank={rank}, shapes={packed}, seed={seed}, "
            f"value_dtype={value_dtype})",
            seed,
        )
        self.rank, self.value_dtype = rank, value_dtype
        self._thin = low_rank(shapes, rank)
        if self._thin.dim == 0:
            raise ValueError(f"shapes have no entries: {shapes}")
        self._right: Tensor | None = None
        self._begun: Begun | None = None

    def parts(self, dim: int) -> Sequence[Part]:
        """All P, all Q and the rest, as one array of numbers."""
        self._check_dim(dim)
        own = self._thin
        return [(own.num_left + own.num_right + own.num_rest, self.value_dtype)]

    def sent(self, vector: Tensor, step: int) -> Sequence[Tensor]:
        """P, Q and the rest in one tensor."""
        vector, own = vector.contiguous(), self._thin
        P = own.orthonormal(own.times_right(vector, self._before(vector, step)))
        return [torch.cat([P, own.times_left(vector, P), own.rest_of(vector)])]

    def recovered(self, parts: Sequence[Tensor], _dim: int, _step: int) -> Tensor:
        """P Qᵀ and the rest, shape (D,)."""
        return self._thin.assembled(*self._split(parts[0]))

    def advance(self, sent: Sequence[Tensor]) -> None:
        """Keep Q for the next step."""
        _, Q, _ = self._split(sent[0])
        self._keep(Q, self.step)
        super().advance(sent)

    @own_arithmetic
    def encode_left(self, vector: Tensor) -> Message:
        """Phase 1: M Q₋₁ and the rest of a vector (D,), to be summed over workers."""
        check_shape(vector)
        self._check_dim(len(vector))
        begun = Begun(vector.contiguous(), self.step)
        right = self._before(vector, self.step)
        P = self._thin.times_right(begun.vector, right)
        numbers = torch.cat([P, self._thin.rest_of(vector)])
        message = self._phase("left", begun, numbers)
        self._right, self._begun = right, begun
        self.step += 1
        return message

    @own_arithmetic
    def encode_right(self, total: Message) -> Message:
        """Phase 2: Mᵀ P with the P of the summed lefts, to be summed over workers."""
        if self._begun is None:
            raise RuntimeError("call encode_left first: no step has begun")
        begun, own = self._begun, self._thin
        left, rest = self._total("left", total, begun, [own.num_left, own.num_rest])
        P = own.orthonormal(left)
        Q = own.times_left(begun.vector, P)
        message = self._phase("right", begun, Q)
        self._begun = replace(begun, left=P, rest=rest)
        return message

    @own_arithmetic
    def decode_right(self, total: Message) -> Tensor:
        """The end: P Qᵀ of the sum of all vectors, shape (D,)."""
        begun = self._begun
        if begun is None or begun.left is None or begun.rest is None:
            raise RuntimeError("decode_right comes after encode_right")
        (Q,) = self._total("right", total, begun, [self._thin.num_right])
        recovered = self._thin.assembled(begun.left, Q, begun.rest)
        check_recovered(recovered)
        self._keep(Q, begun.step)
        self._begun = None
        return recovered

    def state_dict(self) -> dict[str, Tensor]:
        """The next step and Q, flat, once there is one."""
        state = super().state_dict()
        return state if self._right is None else {**state, "right": self._right.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of the same shapes and rank."""
        right = state.get("right")
        if right is not None and right.shape != (self._thin.num_right,):
            raise ValueError(
                f"the saved Q has {right.numel()} numbers, that of these shapes and "
                f"rank {self.rank} has {self._thin.num_right}"
            )
        if right is not None and not right.isfinite().all():
            raise ValueError(
                "the saved Q of a PowerSGD is not finite: the file is damaged; go back "
                "to an older one"
            )
        super().load_state_dict(state)
        self._right = None if right is None else right.clone()
        self._begun = None

    def _before(self, vector: Tensor, step: int) -> Tensor:
        """Q₋₁ of a step, for a vector (D,)."""
        if self._right is not None:
            return self._right.to(vector)
        fresh = self._fresh(step, vector)
        return self._thin.unit_columns(fresh, fresh)

    def _keep(self, Q: Tensor, step: int) -> None:
        self._right = self._thin.unit_columns(Q, self._fresh(step + 1, Q))

    def _fresh(self, step: int, like: Tensor) -> Tensor:
        # Drawn on the CPU: the same on every device.
        fresh = torch.randn(self._thin.num_right, generator=self.random(step))
        return fresh.to(like, non_blocking=True)

    def _split(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """P, Q and the rest out of one tensor."""
        own = self._thin
        P, Q, rest = numbers.split([own.num_left, own.num_right, own.num_rest])
        return P, Q, rest

    def _phase(self, side: str, begun: Begun, numbers: Tensor) -> Message:
        """This worker's message of one phase, which may be added to the others'."""
        name, dtype = f"{self.name}, {side}", self.value_dtype
        parts, kinds = [numbers.to(dtype)], [(len(numbers), dtype)]
        return written(name, begun.step, begun.vector, kinds, parts, dtype)

    def _total(
        self, side: str, total: Message, begun: Begun, sizes: list[int]
    ) -> Sequence[Tensor]:
        """The numbers of the summed messages of one phase, in pieces of these sizes."""
        kinds = [(sum(sizes), self.value_dtype)]
        (numbers,), _, step = read(f"{self.name}, {side}", total, lambda _: kinds)
        if step != begun.step:
            raise ValueError(
                f"the message is of step {step}, this is step {begun.step}"
            )
        return numbers.split(sizes)

    def _check_dim(self, dim: int) -> None:
        if dim != self._thin.dim:
            raise ValueError(
                f"the shapes given have {self._thin.dim} entries together, this "
                f"gradient has {dim}"
            )
