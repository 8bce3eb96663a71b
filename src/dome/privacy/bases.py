"""Where a basis may come from when samples are private: three sources, no other.

Shapes: U (D, K) the basis, r (D,) a released (noised) sum of clipped gradients over the
expected batch size, M (D, K + 1) a released second moment. A source sees public samples
or releases, never private samples. A new one is one class and one line in ``BASES``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dome.options import FilterOptions
from dome.parameters import Layout
from dome.privacy.accounting import PrivacyError
from dome.samples import per_sample_gradients
from dome.trackers import Tracker

SEED = 0x646F6D65  # of the first private basis
ORTHONORMAL = 1e-3  # what float32 and thousands of QR decompositions stay far below
ANOTHER = "the checkpoint has another basis: use the same basis, rank and tracker"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a source of directions may be made of.

    Attributes:
        model: The model that is trained.
        layout: Its parameters.
        options: Those of the filter; the rank is a number.
        window: How many releases make one batch of samples.
        public: Batches (x, y) of public data, where they are given.
        loss_fn: Their loss.
    """

    model: nn.Module
    layout: Layout
    options: FilterOptions
    window: int
    public: Iterable[tuple[Tensor, Tensor]] = ()
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def rank(self) -> int:
        """K."""
        return cast("int", self.options.rank)

    def tracker(self) -> Tracker:
        """A tracker of these options; samples are filtered with U as a matrix."""
        where = {"dtype": self.layout.dtype, "device": self.layout.device}
        return self.options.tracker_for(
            self.layout.dim, self.rank, **where, factored=False
        )


@dataclass(frozen=True, slots=True)
class Release:
    """What a step has released, noise and all.

    Attributes:
        gradient: Σ clip(g) over the expected batch size, noised, shape (D,).
        moment: Σ g̃ [g̃ᵀ U, C] / C² over the expected batch size, noised, shape
            (D, K + 1); None on steps that did not release it.
        moment_std: Standard deviation of the noise in ``moment``.
    """

    gradient: Tensor
    moment: Tensor | None = None
    moment_std: float = 0.0


class Basis:
    """No directions: plain DP-SGD. Base class of the sources of directions.

    Args:
        setting: What it is made of.
    """

    def __init__(self, setting: Setting) -> None:
        self._update_every = setting.options.update_every
        self._num_steps = 0

    @property
    def filters_first(self) -> bool:
        """Whether samples are filtered before they are clipped, or sums after noise."""
        return True

    @property
    def moment_basis(self) -> Tensor | None:
        """U (D, K) of the second moment that a step releases as well; None without."""
        return None

    def prepare(self) -> None:
        """Get ready for a step; nothing of its samples is known."""

    def directions(self) -> Tensor | None:
        """U (D, K); None as long as there is none, and nothing is removed."""
        return None

    def learn(self, release: Release) -> None:
        """Learn from what a step released."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on, as tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state; that of another basis changes nothing here."""
        if state:
            raise ValueError(ANOTHER)


class Public(Basis):
    """Directions of public samples, taken with the model as it is.

    The parameters have been released, so this costs no privacy. A public batch is
    taken on every n-th step, and batches are read again when they end.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._tracker, self._model = setting.tracker(), setting.model
        self._loss_fn = cast("Callable[[Tensor, Tensor], Tensor]", setting.loss_fn)
        self._batches = setting.public
        self._running: Iterator[tuple[Tensor, Tensor]] = iter(())

    def prepare(self) -> None:
        """Turn the basis towards the next public batch."""
        if self._num_steps % self._update_every == 0:
            x, y = self._next()
            grads = per_sample_gradients(self._model, self._loss_fn, x, y)
            self._tracker.update(grads)
        self._num_steps += 1

    def _next(self) -> tuple[Tensor, Tensor]:
        for batch in self._running:
            return batch
        self._running = iter(self._batches)
        for batch in self._running:
            return batch
        raise ValueError("the loader of public data is empty, or can be read only once")

    def directions(self) -> Tensor | None:
        """U of the tracker."""
        return self._tracker.basis

    def state_dict(self) -> dict[str, Tensor]:
        """The tracker's state, and the number of steps."""
        return self._tracker.state_dict() | {"num_steps": torch.tensor(self._num_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on; the public loader starts from its beginning."""
        own = _loaded(self._tracker, state, ("num_steps",))
        self._num_steps = int(own["num_steps"])


class Released(Basis):
    """Directions of past releases: post-processing, which costs no privacy.

    Sums that were filtered have nothing in span(U), and nobody could learn from them
    that U should turn. So on every n-th step samples are clipped as they are, the basis
    learns from the noised sum, and the filter is applied to that sum. On the steps
    between, samples are filtered before they are clipped.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if setting.window < 2:
            raise ValueError(
                f"window must be at least 2 releases, got {setting.window}"
            )
        self._tracker, self._window = setting.tracker(), setting.window
        self._recent: list[Tensor] = []
        self._num_updates = 0

    @property
    def filters_first(self) -> bool:
        """True on the steps from which nothing is learned."""
        return self._num_steps % self._update_every != 0

    def directions(self) -> Tensor | None:
        """U of the tracker, once it has seen releases."""
        return self._tracker.basis if self._num_updates else None

    def learn(self, release: Release) -> None:
        """Keep a release of samples that were not filtered; enough of them turn U."""
        if not self.filters_first:
            self._recent.append(release.gradient.clone())
        self._num_steps += 1
        if len(self._recent) == self._window:
            self._tracker.update(torch.stack(self._recent))
            self._recent.clear()
            self._num_updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The tracker's state, and the releases that wait."""
        waiting = {f"recent.{i}": r.clone() for i, r in enumerate(self._recent)}
        return (
            self._tracker.state_dict()
            | waiting
            | {
                "num_released": torch.tensor(self._num_steps),
                "num_windows": torch.tensor(self._num_updates),
            }
        )

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the releases that were waiting."""
        waiting = [name for name in state if name.startswith("recent.")]
        names = ("num_released", "num_windows", *waiting)
        own = _loaded(self._tracker, state, names)
        self._num_steps = int(own["num_released"])
        self._num_updates = int(own["num_windows"])
        self._recent = [own[f"recent.{i}"].clone() for i in range(len(waiting))]


def _loaded(
    tracker: Tracker, state: dict[str, Tensor], names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Give a basis' tracker its state; the entries of these names, which are not its.

    The state of another basis is refused.
    """
    try:
        own = {name: state[name] for name in names}
        rest = {name: value for name, value in state.items() if name not in own}
        tracker.load_state_dict(rest)
    except (KeyError, ValueError) as error:
        raise ValueError(ANOTHER) from error
    return own


class Private(Basis):
    """Noised power iteration on clipped private samples (Hardt and Price 2014).

    On every n-th step the batch's second moment is released with noise, centred with
    its own noised sum, and folded into the average as in Algorithm 2:

        Y = (t−1)/t U Λ + W/t

    Its noise is paid for together with the gradient's.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        dim, rank = setting.layout.dim, setting.rank
        if not 1 <= rank <= dim:
            raise ValueError(
                f"rank must be between 1 and the number of parameters {dim}, got {rank}"
            )
        # No sample decides it, so anybody may know it.
        public = torch.Generator().manual_seed(SEED)
        start = torch.randn(dim, rank, dtype=torch.float64, generator=public)
        device, dtype = setting.layout.device, setting.layout.dtype
        self._basis = torch.linalg.qr(start).Q.to(device, dtype)
        self._norms = torch.ones(rank, dtype=torch.float64, device=device)
        self._forget, self._num_updates = setting.options.forget, 0

    @property
    def moment_basis(self) -> Tensor | None:
        """The basis that the next second moment is formed with, on every n-th step."""
        return None if self._num_steps % self._update_every else self._basis

    def directions(self) -> Tensor | None:
        """U of the releases so far; None before there are any."""
        return self._basis if self._num_updates else None

    def learn(self, release: Release) -> None:
        """Turn the basis by a step's noised second moment, if it has released one."""
        self._num_steps += 1
        if release.moment is None:
            return
        U = self._basis.to(release.moment)
        A, s = release.moment[:, :-1], release.moment[:, -1]
        # s sᵀU holds the square of the noise of s, in expectation its variance times U.
        W = A - torch.outer(s, s @ U) + release.moment_std**2 * U
        newest = 1 / (self._num_updates + 1)
        if self._forget is not None and self._num_updates:
            newest = self._forget
        Y = (1 - newest) * U * self._norms + newest * W
        self._norms = torch.linalg.vector_norm(Y, dim=0)
        self._basis = torch.linalg.qr(Y).Q.to(self._basis)
        self._num_updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Basis, column norms and counters."""
        return {
            "basis": self._basis.clone(),
            "norms": self._norms.clone(),
            "num_steps": torch.tensor(self._num_steps),
            "num_updates": torch.tensor(self._num_updates),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state.

        The sensitivity of the next second moment needs orthonormal columns: a state
        without them is refused.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(ANOTHER)
        if state["basis"].shape != self._basis.shape:
            raise ValueError(ANOTHER)
        U = state["basis"].double()
        error = (U.T @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max()
        if not error < ORTHONORMAL:
            raise ValueError(
                "the checkpoint's basis has columns that are not orthonormal (off by "
                f"{error:.2g}), so the effect of one sample would not be bounded: the "
                "file is damaged"
            )
        self._basis = state["basis"].to(self._basis, copy=True)
        self._norms = state["norms"].to(self._norms, copy=True)
        self._num_steps = int(state["num_steps"])
        self._num_updates = int(state["num_updates"])


BASES: dict[str, Callable[[Setting], Basis]] = {
    "public": Public,
    "released": Released,
    "private": Private,
}


def check_basis(basis: Any) -> None:  # noqa: ANN401 (anything may be passed)
    """Refuse every source of a basis but the three that keep privacy."""
    if isinstance(basis, str) and basis in BASES:
        return
    raise PrivacyError(
        f"basis={basis!r}: a basis that is updated by private samples reveals them. "
        "The released gradient has nothing along it, not even noise, so no epsilon "
        "covers it. Choose 'public' (a loader of public data), 'released' (past "
        "noised gradients, free) or 'private' (noised power iterations, paid for "
        "jointly)"
    )
