"""The filter as a callback of the Transformers ``Trainer``.

The filter runs inside ``optimizer.step()``: after the accumulated backward passes and
after ``max_grad_norm``. Its state is a file of its own in each checkpoint folder.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from dome.filter import GradientFilter
from dome.integrations.accelerate import (
    TrainerOptions,
    attach,
    check_options,
    unwrapped,
)
from dome.integrations.log import log_row

FILE = "dome_filter.safetensors"
WEIGHTS = "weights"  # the checksum of the weights that a state belongs to


class DomeTrainerCallback(TrainerCallback):  # type: ignore[misc] # is not type-checked
    """Filters the gradients of a Transformers ``Trainer`` while it trains.

        trainer = Trainer(..., callbacks=[DomeTrainerCallback(rank=100)])

    Any ``optim=`` that is a torch optimizer with gradients in ``.grad``, accumulation,
    clipping (which comes first), PEFT adapters (the trained parameters alone are
    filtered). Checkpoints hold the state, and ``resume_from_checkpoint`` goes on bit
    for bit. What the filter did is in every row of the log.

    Args:
        rank: Number of directions K to remove.
        resume_from: The checkpoint folder with the filter's state, if training resumes
            from one outside of ``output_dir``; "nothing" starts with a new basis.
        log_stats: Whether ``.stats`` are logged, as "dome_fraction" and so on.
        **options: Those of ``dome.attach``; in several processes those of
            ``dome.distributed.attach``.

    Attributes:
        trainer: Must be set to the ``Trainer`` if there are several processes, because
            callbacks do not get to see the wrapped model.
    """

    def __init__(
        self,
        rank: int | Mapping[str, int],
        *,
        resume_from: str | Path | None = None,
        log_stats: bool = True,
        **options: Unpack[TrainerOptions],
    ) -> None:
        check_options("DomeTrainerCallback", rank, options)
        self.filter: GradientFilter | None = None
        self.trainer: Trainer | None = None
        self._rank, self._options = rank, options
        self._resume_from = resume_from
        self._log_stats = log_stats

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **_: object,
    ) -> None:
        """Attach the filter, with its state if training resumes."""
        del control
        self._detach()
        self._check(args, optimizer)
        if args.world_size > 1 and self.trainer is not None:
            model = self.trainer.model_wrapped
        self.filter = attach(model, optimizer, self._rank, **self._options)
        if state.global_step > 0 and self._resume_from != "nothing":
            self.filter.load_state_dict(self._saved(args, state, trained(optimizer)))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Optimizer,
        **_: object,
    ) -> None:
        """Put the filter's state into the checkpoint that was just written."""
        del control
        if self.filter is None or args.save_only_model:
            return
        tensors = self.filter.state_dict()  # in several processes all must ask for it
        if args.should_save:
            folder = checkpoint_folder(args, state)
            checked = {WEIGHTS: checksum(trained(optimizer))}
            whole = {name: value.contiguous() for name, value in tensors.items()}
            save_file(whole, folder / FILE, metadata=checked)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        """Add what the filter did to a row of the log that has a loss."""
        del args, control
        if not self._log_stats or self.filter is None or "loss" not in (logs or {}):
            return
        row = log_row(self.filter.stats, "dome_")
        for place in (logs, state.log_history[-1]):
            if place is not None:
                place.update(row)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Remove every hook; ``callback.filter`` keeps its basis and numbers."""
        del args, state, control
        self._detach()

    def _detach(self) -> None:
        if self.filter is not None:
            self.filter.detach()

    def _check(self, args: TrainingArguments, optimizer: Optimizer) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer spreads each batch over {args.n_gpu} GPUs with "
                f"DataParallel: start it with torchrun, or show it one GPU by "
                f"CUDA_VISIBLE_DEVICES=0"
            )
        if args.world_size > 1 and self.trainer is None:
            raise RuntimeError(
                "with several processes the callback needs the Trainer, for its "
                "wrapped model: set callback.trainer = trainer before trainer.train()"
            )
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optim={args.optim} gives a {type(optimizer).__name__}, which is not "
                "a torch optimizer, so the filter cannot run before its step: choose "
                "another optim="
            )

    def _saved(
        self, args: TrainingArguments, state: TrainerState, weights: list[Tensor]
    ) -> dict[str, Tensor]:
        """The filter's state at the step that training resumes at."""
        found = [folder / FILE for folder in self._folders(args, state)]
        found = [path for path in found if path.is_file()]
        expected = checksum(weights)
        for path in found:
            with safe_open(path, framework="pt") as file:
                # The Trainer does not say where it resumes from: the weights do.
                if file.metadata()[WEIGHTS] == expected or self._resume_from:
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
        seen = f"{found[0]} belongs to other weights" if found else "none was found"
        raise RuntimeError(
            f"training resumes at step {state.global_step}, and the filter's state of "
            f"that step is missing ({seen}): pass resume_from= with the checkpoint's "
            f'folder, or resume_from="nothing" to start with a new basis'
        )

    def _folders(self, args: TrainingArguments, state: TrainerState) -> list[Path]:
        if self._resume_from is not None:
            return [Path(self._resume_from)]
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) else []
        return [*folders, checkpoint_folder(args, state)]


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer saves the checkpoint of the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def trained(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer holds."""
    inner, _ = unwrapped(optimizer)
    return [p for group in inner.param_groups for p in group["params"]]


@torch.no_grad()
def checksum(weights: Iterable[Tensor]) -> str:
    """A number that tells these weights from those of another step."""
    total = 0
    for p in weights:
        raw = p.detach().contiguous().reshape(-1).view(torch.uint8)
        total = zlib.crc32(raw.cpu().numpy().data, total)
    return f"{total:08x}"
