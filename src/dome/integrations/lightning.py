"""The filter as a callback of a Lightning ``Trainer``.

Everything ``training_step`` computes is captured, whether it calls ``self(x)``, parts
of itself, or methods of its own. The filter runs inside ``optimizer.step()``: after
``accumulate_grad_batches`` backward passes, after unscaling, after gradient clipping.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Unpack

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import dome.distributed
from dome.attachment import attach
from dome.filter import GradientFilter
from dome.integrations.accelerate import TrainerOptions, check_options
from dome.integrations.log import log_row


class DomeCallback(pl.Callback):  # type: ignore[misc] # Lightning is not type-checked
    """Filters the gradients of a ``LightningModule`` while it is fitted.

        trainer = Trainer(callbacks=[DomeCallback(rank=100)])

    Automatic and manual optimization, accumulation, clipping (which comes first), mixed
    precision with its scaler. The state is in every checkpoint, and a resumed run goes
    on bit for bit. With the DDP strategy the filter is that of ``dome.distributed``.

    Args:
        rank: Number of directions K to remove.
        watch: Name of the submodule whose calls are captured, such as "generator";
            everything in ``training_step`` if not given.
        optimizer: Which of the optimizers of ``configure_optimizers`` is filtered; must
            be given if there are several. A second callback may take another one.
        log_stats: Whether ``.stats`` are logged, as "dome/fraction" and so on.
        **options: Those of ``dome.attach``, with DDP of ``dome.distributed.attach``.
    """

    def __init__(
        self,
        rank: int | Mapping[str, int],
        *,
        watch: str | None = None,
        optimizer: int | None = None,
        log_stats: bool = True,
        **options: Unpack[TrainerOptions],
    ) -> None:
        check_options("DomeCallback", rank, options)
        self.filter: GradientFilter | None = None
        self._rank, self._options = rank, options
        self._watch, self._optimizer = watch, optimizer
        self._log_stats = log_stats
        self._loaded: dict[str, Tensor] | None = None
        self._logged_step = 0
        self._undo: list[Callable[[], None]] = []

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        key: str = self._generate_state_key(
            watch=self._watch, optimizer=self._optimizer
        )
        return key

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach the filter, now that optimizers and the strategy's model are there."""
        self._detach()
        optimizer = self._chosen(trainer.optimizers)
        self.filter = self._attach(trainer, pl_module, optimizer)
        self._undo.append(self.filter.detach)
        if self._loaded is not None:
            self.filter.load_state_dict(self._loaded)
            self._loaded = None
        self._logged_step = self.filter.stats.step
        if isinstance(self.filter, GradientFilter) and self._watch is None:
            self._capture_training_step(trainer, self.filter)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Tell the filter which backward pass is the model's."""
        del trainer, pl_module
        if isinstance(self.filter, GradientFilter) and self._watch is None:
            self.filter.expect_backward(loss)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        *_: Any,  # noqa: ANN401 (outputs, batch and its number are not looked at)
    ) -> None:
        """Log what the filter did, if it did something and the logger listens."""
        if not self._log_stats or self.filter is None:
            return
        # Private, but asking costs nothing and computing numbers for nobody does.
        logger = getattr(trainer, "_logger_connector", None)
        if not getattr(logger, "should_update_logs", True):
            return
        stats = self.filter.stats
        if stats.step == self._logged_step:
            return
        self._logged_step = stats.step
        row = log_row(stats, "dome/")
        pl_module.log_dict(row, on_step=True, on_epoch=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The filter's state, for the checkpoint; with DDP gathered on every worker."""
        if self.filter is None:
            return {} if self._loaded is None else {"filter": self._loaded}
        return {"filter": self.filter.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until the filter is attached."""
        self._loaded = state_dict.get("filter")

    def teardown(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str
    ) -> None:
        """Remove every hook; ``callback.filter`` keeps its basis and numbers."""
        del trainer, pl_module, stage
        self._detach()

    def on_exception(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException,
    ) -> None:
        """Remove every hook."""
        del trainer, pl_module, exception
        self._detach()

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _chosen(self, optimizers: list[Optimizer]) -> Optimizer:
        if self._optimizer is None and len(optimizers) == 1:
            return optimizers[0]
        if self._optimizer is None or not 0 <= self._optimizer < len(optimizers):
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and the "
                f"callback got optimizer={self._optimizer}: choose one by its number, "
                f"such as DomeCallback(..., optimizer=0)"
            )
        return optimizers[self._optimizer]

    def _attach(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer
    ) -> GradientFilter:
        options: dict[str, Any] = {**self._options}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            options.setdefault("scaler", scaler)
        wrapped = trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel):
            return self._attach_workers(wrapped, optimizer, options)
        _check_strategy(trainer, module)
        if options.get("samples", "per_sample") == "per_sample":
            _check_not_compiled(module)
        return attach(self._watched(module), optimizer, self._rank, **options)

    def _attach_workers(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        options: dict[str, Any],
    ) -> GradientFilter:
        if self._watch is not None:
            raise ValueError(
                f"watch={self._watch!r} is for one process: under DDP the whole "
                f"training_step is captured, leave it out"
            )
        if options.get("samples") == "microbatch":
            options["samples"] = "worker"  # the same, by its name across workers
        return dome.distributed.attach(model, optimizer, self._rank, **options)

    def _watched(self, module: pl.LightningModule) -> nn.Module:
        if self._watch is None:
            return module
        try:
            return module.get_submodule(self._watch)
        except AttributeError as error:
            known = ", ".join(repr(name) for name, _ in module.named_children())
            raise ValueError(
                f"watch={self._watch!r} is not a submodule of {type(module).__name__}, "
                f"which has {known}"
            ) from error

    def _capture_training_step(
        self, trainer: pl.Trainer, grad_filter: GradientFilter
    ) -> None:
        """Capture all of ``training_step``: it is no call of the module to torch."""
        # On the strategy, which lives as long as the fit, so that the module can still
        # be copied and pickled.
        strategy, original = trainer.strategy, trainer.strategy.training_step

        @wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with grad_filter.watch(*args, **kwargs):
                return original(*args, **kwargs)

        strategy.training_step = training_step
        self._undo.append(lambda: delattr(strategy, "training_step"))


def _check_strategy(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse strategies that split parameters or keep gradients to themselves."""
    if trainer.strategy.model is not module or trainer.world_size > 1:
        raise ValueError(
            f"the strategy {type(trainer.strategy).__name__} splits the model over "
            f'devices: train on one device, or with strategy="ddp"'
        )


def _check_not_compiled(module: pl.LightningModule) -> None:
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            f"{type(module).__name__} is compiled by torch.compile: its operations "
            'cannot be seen; fit the module itself, or use samples="microbatch"'
        )
