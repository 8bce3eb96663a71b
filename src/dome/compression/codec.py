"""Base class of the compressors: messages, the round trip, steps and state.

A subclass says what it sends of a vector and what it makes of that. Shape: a vector
(D,).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dome.compression.message import FRONT_BYTES, Message, arrived, read, written
from dome.compression.noise import CPU, generator_of
from dome.compression.packing import Part, packed_size
from dome.compression.vector import check_finite, check_recovered, check_shape
from dome.torch_private import own_arithmetic


class Codec:
    """A compressor whose subclass gives ``parts``, ``sent`` and ``recovered``.

    Encoding counts steps; a vector that is refused is no step. If ``is_unbiased``, the
    subclass gives ``variance(dim)`` too, the least ω with E‖C(g) − g‖² ≤ ω ‖g‖².

    Args:
        name: The compressor with all settings that decoding depends on. Messages of
            another name are refused.
        seed: Of its random numbers; None if it draws none.
    """

    is_linear = False
    is_unbiased = False

    def __init__(self, name: str, seed: int | None = None) -> None:
        if seed is not None and seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.name, self.seed = name, seed
        self.step = self.worker = 0

    def __repr__(self) -> str:
        return self.name

    def parts(self, dim: int) -> Sequence[Part]:
        """What a message of D numbers is made of: see ``Part``."""
        raise NotImplementedError

    def sent(self, vector: Tensor, step: int, /) -> Sequence[Tensor]:
        """What is sent of a vector (D,): the values of each part."""
        raise NotImplementedError

    def recovered(self, parts: Sequence[Tensor], dim: int, step: int, /) -> Tensor:
        """The vector (D,) made of what was sent, numbers in the vector's dtype."""
        raise NotImplementedError

    def num_bits(self, dim: int) -> int:
        """Size of the message of a vector of D numbers, all that travels."""
        return 8 * (FRONT_BYTES + sum(packed_size(part) for part in self.parts(dim)))

    @own_arithmetic
    def encode(self, vector: Tensor) -> Message:
        """The message of a vector of shape (D,), at the next step."""
        sent, parts = self._sent(vector)
        kinds, name = self.parts(len(vector)), self.name_on(vector.device)
        dtype = parts[0].dtype if self.is_linear else None
        message = written(name, self.step, vector, kinds, parts, dtype)
        self.advance(sent)
        return message

    @own_arithmetic
    def decode(self, message: Message) -> Tensor:
        """The vector recovered from a message, shape (D,), of the dtype it had."""
        name = self.name_on(message.payload.device)
        vector = self.recovered(*read(name, message, self.parts))
        check_recovered(vector)
        return vector

    @own_arithmetic
    def __call__(self, vector: Tensor) -> Tensor:
        """What arrives of a vector of shape (D,): its message's, without the bytes."""
        sent, parts = self._sent(vector)
        there = arrived(parts, vector.dtype)
        recovered = self.recovered(there, len(vector), self.step)
        check_finite(vector, [*parts, recovered])
        self.advance(sent)
        return recovered

    def advance(self, _sent: Sequence[Tensor], /) -> None:
        """Go on to the next step; what was sent is for compressors with a memory."""
        self.step += 1

    def name_on(self, _device: torch.device, /) -> str:
        """The name in messages; with the device's if what it draws depends on it."""
        return self.name

    def random(self, step: int, device: torch.device = CPU) -> torch.Generator:
        """The generator of a step. Numbers differ between kinds of devices."""
        return generator_of(self.seed or 0, step, self.worker, device)

    def state_dict(self) -> dict[str, Tensor]:
        """The number of the next step."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on at a saved step."""
        if "step" not in state:
            if self.seed is not None:
                raise ValueError(
                    "this is not a state of a compressor with noise: it has no "
                    f"'step', only {sorted(state)}"
                )
            state = {"step": torch.tensor(0)}  # from before these counted steps
        step = state["step"]
        if step.numel() != 1 or step.is_floating_point() or int(step) < 0:
            raise ValueError(
                f"'step' in the state of a compressor is {step.tolist()}, not a number "
                f"of steps: the file is damaged; go back to an older one"
            )
        self.step = int(step)

    def _sent(self, vector: Tensor) -> tuple[Sequence[Tensor], list[Tensor]]:
        """What is sent of a vector (D,), and the same with numbers rounded."""
        check_shape(vector)
        sent = self.sent(vector, self.step)
        pairs = zip(sent, self.parts(len(vector)), strict=True)
        return sent, [
            values.to(kind) if isinstance(kind, torch.dtype) else values
            for values, (_, kind) in pairs
        ]
