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

from dome.compression import method
from dome.compression.fields import Field, numbers
from dome.compression.format import Format, check_number_dtype
from dome.compression.low_rank import low_rank
from dome.compression.message import Message
from dome.compression.method import Parts
from dome.compression.noise import DEFAULT_SEED, Noise
from dome.compression.vector import check_finite, check_recovered, check_shape
from dome.numerics.arithmetic import own_arithmetic
from dome.parameters import Layout


@dataclass(frozen=True, slots=True)
class Exchange:
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


class PowerSGD:
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

    is_linear = False
    is_unbiased = False

    num_bits, decode = method.num_bits, method.decode

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
        self.rank, self.value_dtype = rank, value_dtype
        self._parts = low_rank(shapes, rank)
        if self._parts.dim == 0:
            raise ValueError(f"shapes have no entries: {shapes}")
        self.noise = Noise(seed)
        self._right: Tensor | None = None
        self._exchange: Exchange | None = None
        parts = self._parts
        packed = zlib.crc32(str(shapes).encode())
        # The seed too: workers agree on P and Q only if they began with the same Q.
        self._settings = {
            "rank": rank,
            "shapes": packed,
            "seed": seed,
            "value_dtype": value_dtype,
        }
        left, right = parts.num_left + parts.num_rest, parts.num_right
        self.format = self._format_of("PowerSGD", left + right)
        self._left_format = self._format_of("PowerSGD's left", left, value_dtype)
        self._right_format = self._format_of("PowerSGD's right", right, value_dtype)

    def __repr__(self) -> str:
        return f"PowerSGD({len(self._parts.matrices)} matrices, rank={self.rank})"

    @own_arithmetic
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,), at the next step."""
        step, Q, numbers = self._sent(vector)
        check_finite(vector, [numbers])
        self._go_on(Q, step)
        return self.format.write(vector, step, [numbers])

    @own_arithmetic
    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,)."""
        step, Q, numbers = self._sent(vector)
        parts = method.arrived([numbers], vector.dtype)
        recovered = self.recovered(parts, len(vector), step)
        check_finite(vector, [numbers, recovered])
        self._go_on(Q, step)
        return recovered

    def recovered(self, parts: Parts, _dim: int, _step: int) -> Tensor:
        """P Qᵀ and the rest, shape (D,)."""
        (sent,), own = parts, self._parts
        P, Q, rest = sent.split([own.num_left, own.num_right, own.num_rest])
        return own.assembled(P, Q, rest)

    @own_arithmetic
    def encode_left(self, vector: Tensor) -> Message:
        """Phase 1: M Q₋₁ and the rest of a vector (D,), to be summed over workers."""
        vector, step, right = self._begin(vector)
        P = self._parts.times_right(vector, right)
        numbers = torch.cat([P, self._parts.rest_of(vector)]).to(self.value_dtype)
        check_finite(vector, [numbers])
        self._right = right
        self.noise.advance()
        self._exchange = Exchange(vector, step)
        return self._left_format.write(vector, step, [numbers])

    @own_arithmetic
    def encode_right(self, total: Message) -> Message:
        """Phase 2: Mᵀ P with the P of the summed lefts, to be summed over workers."""
        begun, own = self._begun(), self._parts
        numbers = self._numbers(self._left_format, total, begun)
        left, rest = numbers.split([own.num_left, own.num_rest])
        P = own.orthonormal(left)
        Q = own.times_left(begun.vector, P).to(self.value_dtype)
        check_finite(begun.vector, [Q])
        self._exchange = replace(begun, left=P, rest=rest)
        return self._right_format.write(begun.vector, begun.step, [Q])

    @own_arithmetic
    def decode_right(self, total: Message) -> Tensor:
        """The end: P Qᵀ of the sum of all vectors, shape (D,)."""
        begun = self._begun()
        if begun.left is None or begun.rest is None:
            raise RuntimeError("decode_right comes after encode_right")
        Q = self._numbers(self._right_format, total, begun)
        recovered = self._parts.assembled(begun.left, Q, begun.rest)
        check_recovered(recovered)
        self._keep(Q, begun.step)
        self._exchange = None
        return recovered

    def state_dict(self) -> dict[str, Tensor]:
        """The next step and Q, flat, once there is one."""
        state = self.noise.state_dict()
        return state if self._right is None else {**state, "right": self._right.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of the same shapes and rank."""
        right = state.get("right")
        if right is not None and right.shape != (self._parts.num_right,):
            raise ValueError(
                f"the saved Q has {right.numel()} numbers, that of these shapes and "
                f"rank {self.rank} has {self._parts.num_right}"
            )
        if right is not None and not right.isfinite().all():
            raise ValueError(
                "the saved Q of a PowerSGD is not finite: the file is damaged; go back "
                "to an older one"
            )
        self.noise.load_state_dict(state)
        self._right = None if right is None else right.clone()
        self._exchange = None

    def _sent(self, vector: Tensor) -> tuple[int, Tensor, Tensor]:
        """This step, Q, and what is sent: P, Q and the rest in one tensor."""
        vector, step, right = self._begin(vector)
        P = self._parts.orthonormal(self._parts.times_right(vector, right))
        Q = self._parts.times_left(vector, P)
        sent = torch.cat([P, Q, self._parts.rest_of(vector)])
        return step, Q, sent.to(self.value_dtype)

    def _go_on(self, Q: Tensor, step: int) -> None:
        self._keep(Q, step)
        self.noise.advance()

    def _begin(self, vector: Tensor) -> tuple[Tensor, int, Tensor]:
        """The vector (D,), the step and its Q₋₁."""
        check_shape(vector)
        self._check_dim(len(vector))
        step, right = self.noise.step, self._right
        if right is None:
            fresh = self._fresh(step, vector)
            right = self._parts.unit_columns(fresh, fresh)
        return vector.contiguous(), step, right.to(vector)

    def _begun(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("call encode_left first: no step has begun")
        return self._exchange

    def _keep(self, Q: Tensor, step: int) -> None:
        self._right = self._parts.unit_columns(Q, self._fresh(step + 1, Q))

    def _fresh(self, step: int, like: Tensor) -> Tensor:
        # Drawn on the CPU: the same on every device.
        random = self.noise.generator(step)
        fresh = torch.randn(self._parts.num_right, generator=random)
        return fresh.to(like, non_blocking=True)

    def _numbers(self, form: Format, total: Message, begun: Exchange) -> Tensor:
        header, parts = form.read(total)
        if header.step != begun.step:
            raise ValueError(
                f"the message is of step {header.step}, this is step {begun.step}"
            )
        (numbers,) = method.arrived(parts, begun.vector.dtype)
        return numbers

    def _check_dim(self, dim: int) -> None:
        if dim != self._parts.dim:
            raise ValueError(
                f"the shapes given have {self._parts.dim} entries together, this "
                f"gradient has {dim}"
            )

    def _format_of(
        self, name: str, num_numbers: int, sum_dtype: torch.dtype | None = None
    ) -> Format:
        def fields(dim: int) -> tuple[Field, ...]:
            self._check_dim(dim)
            return (numbers(num_numbers, self.value_dtype),)

        return Format(name, self._settings, fields, sum_dtype)
