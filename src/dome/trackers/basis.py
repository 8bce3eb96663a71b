"""The tall matrix a tracker keeps, and the few things that are done to it.

Shapes: U (D, W) with W = K + oversample orthonormal columns, G (B, D) samples.
"""

import torch
from torch import Tensor

from dome.numerics.linalg import (
    LONG_MEAN,
    Products,
    compute_dtype,
    row_blocks,
)
from dome.numerics.orthonormal import orthogonality_limit, orthonormalize_
from dome.numerics.shard import Shard
from dome.numerics.tall import Tall, is_written_out
from dome.trackers.protocol import Update

STORAGE = (torch.float32, torch.float64, torch.bfloat16)
CHECK_EVERY = (
    100  # updates between two measurements of |UᵀU − I|, about 1 % of their cost
)
CHECK_EVERY_16_BIT = 10
DEFAULT_SEED = (
    0x646F6D65  # not 0: a user's own seed 0 must not give the same directions
)


class Basis:
    """U in its storage format, kept orthonormal.

    Args:
        dim: Rows D.
        rank: Columns K that are removed from gradients.
        oversample: Columns tracked beyond those; no more than D − K are.
        dtype: Storage of U.
        device: Where U lives.
        generator: Gives the seed of every random direction; a fixed seed without it.
        shard: The rows that are held here, if other workers hold the others.
        factored: Whether U may be kept as a product.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        oversample: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        generator: torch.Generator | None,
        shard: Shard | None = None,
        *,
        factored: bool = True,
    ) -> None:
        if oversample < 0:
            raise ValueError(f"oversample must not be negative, got {oversample}")
        if dtype not in STORAGE:
            raise ValueError(f"dtype must be one of {STORAGE}, got {dtype}")
        self._shard = Shard.whole(dim) if shard is None else shard
        self.total = self._shard.total
        self.rank, self.oversample = rank, min(oversample, dim - rank)
        self.width = rank + self.oversample
        self.compute_dtype = compute_dtype(dtype)
        # The same for all workers: a checkpoint puts their rows together.
        turns = factored and not is_written_out(dim, self.width, dtype.itemsize)
        num_rows = self._shard.num_rows
        self._tall = Tall(
            num_rows, self.width, dtype, device, self.total, may_turn=turns
        )
        self._beyond = torch.arange(self.width, device=device) >= rank
        self.orthogonality_error = 0.0
        self._seed = DEFAULT_SEED if generator is None else _draw_seed(generator)
        self._check_every = (
            CHECK_EVERY if self.compute_dtype == dtype else CHECK_EVERY_16_BIT
        )
        # Squared norm below which a unit column is rounding: that of the products.
        self.floor = 1e-10 if self.compute_dtype == torch.float32 else 1e-13
        self._leading: Tensor | None = None
        self._leading_eigenvalues: Tensor | None = None

    def start_random(self) -> None:
        """U₀: QR of a Gaussian matrix."""
        every = torch.ones(self.width, dtype=torch.bool, device=self._tall.device)
        self.orthonormalize_(0, every)
        if self.oversample:
            # Which columns lead is not known yet: any do, and the state has its entry.
            eye = torch.eye(self.width, dtype=torch.float64, device=self._tall.device)
            self._leading = eye[:, : self.rank].contiguous()
            self._leading_eigenvalues = torch.ones_like(eye[0, : self.rank])

    @property
    def U(self) -> Tensor:  # noqa: N802 (the paper's symbol)
        """All the columns, shape (D, W); a view that the next update makes invalid."""
        return self._tall.U

    def write_out(self) -> None:
        """Make U one matrix, which can then be read without a copy."""
        self._tall.settled()

    def see(self, G: Tensor, scale: float, *, pairwise: bool) -> Products:
        """What an update must know of the samples ``scale * G``."""
        return self._tall.products(G, pairwise=pairwise).scaled(scale)

    def outside(self, G: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """H⊥ U and H⊥ H⊥ᵀ of H⊥ = H − V Uᵀ, what samples have outside U."""
        return self._tall.outside(G, V, scale)

    def recombine_(
        self,
        P: Tensor,
        G: Tensor | None = None,
        M: Tensor | None = None,
        seen: Products | None = None,
    ) -> None:
        """U ← U P + Hᵀ M; P may be a diagonal (W,)."""
        centered = seen is not None and seen.mean_is_long(LONG_MEAN)
        self._tall.recombine_(P, G, M, centered=centered)

    def add_action_(self, s: Tensor, a: float, action: Tensor) -> None:
        """U ← U diag(s) + a W for a tall W of U's shape."""
        U, s = self._tall.settled(), s.to(self.compute_dtype)
        for rows in row_blocks(*U.shape):
            new = U[rows].to(self.compute_dtype) * s
            U[rows] = new.add_(action[rows], alpha=a).to(U.dtype)

    def coordinates_of(self, G: Tensor, scale: float) -> Tensor:
        """Coordinates of the samples ``scale * G`` in U, shape (B, W)."""
        return scale * self._tall.coordinates_of(G)

    def _removed(self, c: Tensor) -> Tensor:
        """Of coordinates in U, those along the directions that are removed."""
        if self._leading is not None:
            return self._leading @ (self._leading.T @ c)
        return c if self.rank == self.width else c.masked_fill(self._beyond, 0.0)

    def gram(self) -> Tensor:
        """Uᵀ U, shape (W, W)."""
        return self._tall.gram()

    def orthonormalize_(
        self, update: int, empty: Tensor | None = None, num_columns: int | None = None
    ) -> None:
        """Make the first columns orthonormal, with random ones where ``empty``."""
        # Seeded by the update's number, so that a resumed run draws the same
        # directions.
        U = self._tall.settled()
        generator = torch.Generator(U.device).manual_seed(self._seed + update)
        error = orthonormalize_(U[:, :num_columns], generator, empty, self._shard)
        self.orthogonality_error = float(error)

    def check_orthogonality(self, update: int) -> None:
        """Measure |UᵀU − I| now and then, and mend what rounding did to it."""
        if not self.is_checked_before(update):
            return
        C = self.gram()
        # Zero columns, always the last ones, have not been reached by the data yet.
        present = int((C.diagonal() > 0).sum())
        if present == 0:
            return
        eye = torch.eye(present, dtype=C.dtype, device=C.device)
        self.orthogonality_error = float((C[:present, :present] - eye).abs().max())
        limit = orthogonality_limit(self._tall.dtype, self._shard.dim)
        if self.orthogonality_error > limit:
            self.orthonormalize_(update, num_columns=present)

    def is_checked_before(self, update: int) -> bool:
        """Whether U may be mended before this update."""
        return update > 0 and update % self._check_every == 0

    def update_of(
        self,
        seen: Products,
        P: Tensor | None = None,
        M: Tensor | None = None,
        measured: Tensor | None = None,
    ) -> Update:
        """The record of U ← U P + Hᵀ M, or of no change.

        The coordinates G U (B, W) with the new basis follow from what was seen with the
        old one, as long as the new one is exactly that combination and H Hᵀ is known.
        Otherwise they are to be ``measured``.
        """
        old = seen.V + seen.m
        if P is None or M is None:
            overlap = torch.eye(self.width, dtype=old.dtype, device=old.device)
            new = old
        else:
            overlap = torch.addmm(P, seen.V.T, M)
            if measured is None:
                measured = old @ P + (seen.K + seen.Hmu) @ M
            new = measured
        new = new[:, : self.rank] if self._leading is None else new @ self._leading
        # Rows of directions that were not there yet are zero and do not count.
        squares = overlap.square().sum(dim=1)
        cosines = squares.sum() / (squares > 0).sum().clamp(min=1)
        return Update(
            captured=new.square().sum(dim=1),
            total=seen.sample_norms_squared,
            drift=(1 - cosines).clamp(min=0.0).sqrt(),
            mean_captured=new.mean(dim=0).square().sum(),
            mean_total=seen.mu2,
        )

    def select_leading(self, C: Tensor, R_inverse: Tensor) -> None:
        """Rotation to the leading K left singular vectors of Y = U R, from C = RᵀR."""
        # R = R⁻ᵀ C where R is invertible; R Rᵀ has the squared singular values of Y.
        R = R_inverse.T @ C
        values, vectors = torch.linalg.eigh(R @ R.T)
        self._leading = vectors.flip(1)[:, : self.rank].contiguous()
        self._leading_eigenvalues = values.flip(0)[: self.rank].clamp(min=0.0).sqrt()

    def leading(self) -> Tensor:
        """The K columns that are removed from gradients, shape (D, K)."""
        U = self.U
        if self._leading is None:
            return U[:, : self.rank]
        rotation = self._leading.to(self.compute_dtype)
        return (U.to(self.compute_dtype) @ rotation).to(U.dtype)

    def leading_eigenvalues(self, all_values: Tensor) -> Tensor:
        """The eigenvalues that go with ``leading()``, shape (K,)."""
        if self._leading_eigenvalues is None:
            return all_values[: self.rank].clone()
        return self._leading_eigenvalues.clone()

    def project_out(
        self, gradient: Tensor, strength: float, coordinates: Tensor | None = None
    ) -> Tensor:
        """g − strength · U Uᵀ g, shape (D,); Uᵀ g (W,) is computed if not given."""
        num_rows = self._shard.num_rows
        if gradient.shape != (num_rows,):
            raise ValueError(
                f"gradient must have shape ({num_rows},), got {tuple(gradient.shape)}"
            )
        if coordinates is None:
            coordinates = self._tall.coordinates_of(gradient[None])[0]
        return self._tall.subtract(gradient, strength * self._removed(coordinates))

    def state_dict(self) -> dict[str, Tensor]:
        """The matrix and what its upkeep depends on."""
        state = self._tall.state_dict() | {"seed": torch.tensor(self._seed)}
        state["orthogonality_error"] = torch.tensor(
            self.orthogonality_error, dtype=torch.float64
        )
        if self._leading is not None and self._leading_eigenvalues is not None:
            state["leading"] = self._leading
            state["leading_eigenvalues"] = self._leading_eigenvalues
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take a state back; its shape and storage must be the same."""
        there, here = state["basis"], self._tall.state_dict()["basis"]
        if there.shape != here.shape:
            raise ValueError(
                f"the saved basis has shape {tuple(there.shape)}, this one "
                f"{tuple(here.shape)}: same model, rank and oversample are needed"
            )
        if there.dtype != here.dtype:
            raise ValueError(
                f"the saved basis is {there.dtype}, this one {here.dtype}: choose the "
                f"same storage, it cannot be resumed bit for bit otherwise"
            )
        if len(state["mix"]) not in (0, self.width):
            raise ValueError(
                f"the saved mix has shape {tuple(state['mix'].shape)}, a basis of "
                f"{self.width} columns has none or a square one: it was written by an "
                f"older version of dome, finish that run with it"
            )
        self._tall.load_state_dict(state)
        self._seed = int(state["seed"])
        self.orthogonality_error = float(state["orthogonality_error"])
        for name in ("leading", "leading_eigenvalues"):
            value = state.get(name)
            value = None if value is None else value.to(here.device, copy=True)
            setattr(self, f"_{name}", value)


def _draw_seed(generator: torch.Generator) -> int:
    device = generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))
