import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from loops import digits_like, flat, literal, plain, sgd
from models import small_classifier
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dome
from dome.compression import ErrorFeedback, TopK
from dome.integrations.lightning import DomeCallback

pytestmark = [
    # Lightning's advice on workers, progress bars and the like.
    pytest.mark.filterwarnings("ignore"),
    # And what it says on every fit.
    pytest.mark.usefixtures("quiet"),
]


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


class Classifier(pl.LightningModule):
    """Calls itself; the others below reach their layers in other ways."""

    def __init__(self, net=None, make=sgd):
        super().__init__()
        self.net = net or small_classifier()
        self.make = make

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self):
        return self.make(self)


class CallsANet(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": cross_entropy(self.net(x), y), "inputs": x}


class CallsParts(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.net[2](self.net[1](self.net[0](x))), y)


class Manual(Classifier):
    def __init__(self, *args, accumulate=1):
        super().__init__(*args)
        self.automatic_optimization = False
        self.accumulate = accumulate

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(cross_entropy(self.net(x), y) / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def loader(num=48, size=12, dtype=torch.float64):
    return DataLoader(TensorDataset(*digits_like(num, dtype)), batch_size=size)


def trainer(callback, folder, **options):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | {
        "precision": "64-true",
        **options,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[callback, *options.pop("more", [])],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(module, callback, folder, data=None, ckpt_path=None, **options):
    trainer(callback, folder, **options).fit(
        module, data or loader(), ckpt_path=ckpt_path
    )
    return flat(module)


@pytest.mark.parametrize("kind", [Classifier, CallsANet, CallsParts, Manual])
def test_training_gives_the_numbers_of_the_plain_loop(kind, tmp_path):
    callback = DomeCallback(rank=4)
    expected, grad_filter = plain([*loader(), *loader()])
    assert torch.equal(fit(kind(), callback, tmp_path), expected)
    assert callback.filter.stats.fraction == grad_filter.stats.fraction
    assert callback.filter.stats.step == 8


class Checkpointed(Classifier):
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class CheckpointedNet(CallsANet):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = checkpoint(self.net, x, use_reentrant=False)
        return {"loss": cross_entropy(out, y), "inputs": x}


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedNet])
def test_activation_checkpointing_changes_no_number(kind, tmp_path):
    expected, _ = plain([*loader(), *loader()])
    assert torch.equal(fit(kind(), DomeCallback(rank=4), tmp_path), expected)


@pytest.mark.parametrize("kind", [CallsParts, Manual])
def test_training_agrees_with_algorithm_one_and_one_backward_a_sample(kind, tmp_path):
    def without_momentum(module):
        return torch.optim.SGD(module.parameters(), lr=0.3)

    trained = fit(kind(None, without_momentum), DomeCallback(rank=4), tmp_path)
    torch.testing.assert_close(trained, literal([*loader(), *loader()]))


@pytest.mark.parametrize("manual", [False, True])
def test_accumulated_batches_are_samples_of_one_step(manual, tmp_path):
    module = Manual(accumulate=2) if manual else CallsANet()
    options = {} if manual else {"accumulate_grad_batches": 2}
    trained = fit(module, DomeCallback(rank=4), tmp_path, **options)
    expected, _ = plain([*loader(), *loader()], accumulate=2)
    assert torch.equal(trained, expected)


def test_accumulation_agrees_with_algorithm_one_on_the_batch_as_a_whole(tmp_path):
    module = CallsANet(make=lambda m: torch.optim.SGD(m.parameters(), lr=0.3))
    trained = fit(module, DomeCallback(rank=4), tmp_path, accumulate_grad_batches=2)
    expected = literal([*loader(), *loader()], accumulate=2)
    torch.testing.assert_close(trained, expected)


def test_a_short_last_batch_in_an_accumulated_step(tmp_path):
    data = loader(num=45)
    trained = fit(
        Classifier(), DomeCallback(rank=4), tmp_path, data, accumulate_grad_batches=2
    )
    assert torch.equal(trained, plain([*data, *data], accumulate=2)[0])


@pytest.mark.parametrize("kind", [CallsANet, Manual])
def test_micro_batches_as_samples_with_batch_norm(kind, tmp_path):
    def net():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        return model.double()

    options = {"rank": 2, "samples": "microbatch"}
    module = Manual(net(), accumulate=4) if kind is Manual else kind(net())
    accumulate = {} if kind is Manual else {"accumulate_grad_batches": 4}
    trained = fit(module, DomeCallback(**options), tmp_path, **accumulate)
    expected, grad_filter = plain(
        [*loader(), *loader()], accumulate=4, model=net(), **options
    )
    assert torch.equal(trained, expected)
    assert grad_filter.stats.fraction > 0


def test_clipping_comes_before_the_filter_as_in_the_plain_loop(tmp_path):
    trained = fit(Classifier(), DomeCallback(rank=4), tmp_path, gradient_clip_val=0.05)
    expected, _ = plain([*loader(), *loader()], clip=0.05)
    assert torch.equal(trained, expected)


def test_lbfgs_calls_the_training_step_several_times(tmp_path):
    def lbfgs(module):
        return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)

    trained = fit(CallsANet(make=lbfgs), DomeCallback(rank=4), tmp_path, max_epochs=1)
    model = small_classifier()
    optimizer = lbfgs(model)
    grad_filter = dome.attach(model, optimizer, rank=4)
    for x, y in loader():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert torch.equal(trained, flat(model))
    assert grad_filter.stats.step > 8


def test_bfloat16_autocast(tmp_path):
    single = loader(dtype=torch.float32)
    net = small_classifier(torch.float32)
    trained = fit(
        CallsANet(net), DomeCallback(rank=4), tmp_path, single, precision="bf16-mixed"
    )
    model = small_classifier(torch.float32)
    optimizer = sgd(model)
    dome.attach(model, optimizer, rank=4)
    for x, y in [*single, *single]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert torch.equal(trained, flat(model))


def test_float16_with_a_scaler_whose_factor_is_taken_out(tmp_path):
    single = loader(dtype=torch.float32)

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    plugin = MixedPrecision("16-mixed", "cpu", scaler())
    callback = DomeCallback(rank=4)
    options = {"plugins": [plugin], "precision": None}
    net = small_classifier(torch.float32)
    trained = fit(CallsANet(net), callback, tmp_path, single, **options)
    model, mine = small_classifier(torch.float32), scaler()
    optimizer = sgd(model)
    grad_filter = dome.attach(model, optimizer, rank=4, scaler=mine)
    for x, y in [*single, *single]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = cross_entropy(model(x), y)
        mine.scale(loss).backward()
        mine.step(optimizer)
        mine.update()
    assert torch.equal(trained, flat(model))
    theirs = callback.filter.trackers["all"].eigenvalues
    assert torch.equal(theirs, grad_filter.trackers["all"].eigenvalues)


def test_a_penalty_in_the_training_step_is_no_sample_of_the_batch(tmp_path):
    class Penalised(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            penalty = sum(p.square().sum() for p in self.parameters())
            return cross_entropy(self.net(x), y) + 0.01 * penalty

    trained = fit(Penalised(), DomeCallback(rank=4), tmp_path)
    model = small_classifier()
    optimizer = sgd(model)
    dome.attach(model, optimizer, rank=4)
    for x, y in [*loader(), *loader()]:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        (cross_entropy(model(x), y) + 0.01 * penalty).backward()
        optimizer.step()
    torch.testing.assert_close(trained, flat(model))


class Recorder(pl.loggers.Logger):
    name, version = "recorder", "0"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_what_the_filter_did_goes_to_the_logger(tmp_path):
    recorder = Recorder()
    options = {"logger": recorder, "log_every_n_steps": 2}
    callback = DomeCallback(rank=4)
    fit(Classifier(), callback, tmp_path, **options)
    rows = [row for row in recorder.rows if "dome/fraction" in row]
    assert len(rows) == 4
    assert rows[-1]["dome/fraction"] == pytest.approx(callback.filter.stats.fraction)
    assert {"dome/kept_norm", "dome/drift", "dome/seconds"} <= set(rows[-1])
    recorder.rows.clear()
    fit(Classifier(), DomeCallback(rank=4, log_stats=False), tmp_path, **options)
    assert not [row for row in recorder.rows if "dome/fraction" in row]


def resumable(folder):
    callback = DomeCallback(
        rank=4, update_every=2, warmup=1, after=ErrorFeedback(TopK(rate=5))
    )
    keep = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    return callback, {"more": [keep], "enable_checkpointing": True}


def test_a_run_resumed_from_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    callback, options = resumable(tmp_path / "whole")
    whole = fit(Classifier(), callback, tmp_path, max_epochs=4, **options)
    callback, options = resumable(tmp_path / "again")
    again = fit(
        Classifier(),
        callback,
        tmp_path,
        ckpt_path=tmp_path / "whole" / "epoch=1.ckpt",
        max_epochs=4,
        **options,
    )
    assert torch.equal(again, whole)
    assert callback.filter.stats.step == 16


def test_a_checkpoint_holds_tensors_only(tmp_path):
    callback, options = resumable(tmp_path / "saved")
    fit(Classifier(), callback, tmp_path, **options)
    saved = torch.load(tmp_path / "saved" / "epoch=1.ckpt", weights_only=True)
    state = saved["callbacks"][callback.state_key]["filter"]
    assert "parameters.net.0.weight" in state
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_a_checkpoint_of_another_rank_is_refused_by_name(tmp_path):
    callback, options = resumable(tmp_path / "saved")
    fit(Classifier(), callback, tmp_path, **options)
    other = DomeCallback(rank=5)
    path = tmp_path / "saved" / "epoch=1.ckpt"
    with pytest.raises(ValueError, match="tracks 4 directions"):
        fit(Classifier(), other, tmp_path, ckpt_path=path, max_epochs=4)


class Two(pl.LightningModule):
    """A model and its critic, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.model, self.critic = small_classifier(), small_classifier(seed=1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer, net in zip(
            self.optimizers(), (self.model, self.critic), strict=True
        ):
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(net(x), y))
            optimizer.step()

    def configure_optimizers(self):
        return [sgd(self.model), sgd(self.critic)]


def test_two_optimizers_with_a_callback_each(tmp_path):
    first = DomeCallback(rank=4, watch="model", optimizer=0)
    second = DomeCallback(rank=3, watch="critic", optimizer=1)
    module = Two()
    fit(module, first, tmp_path, more=[second])
    batches = [*loader(), *loader()]
    assert torch.equal(flat(module.model), plain(batches)[0])
    expected, _ = plain(batches, rank=3, model=small_classifier(seed=1))
    assert torch.equal(flat(module.critic), expected)
    assert first.state_key != second.state_key


def test_which_of_two_optimizers_must_be_said(tmp_path):
    with pytest.raises(ValueError, match="returned 2 optimizers"):
        fit(Two(), DomeCallback(rank=4), tmp_path)


def test_a_submodule_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="watch='nett' is not a submodule"):
        fit(Classifier(), DomeCallback(rank=4, watch="nett"), tmp_path)


def test_a_compiled_module_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is compiled"):
        trainer(DomeCallback(rank=4), tmp_path).fit(
            torch.compile(Classifier()), loader()
        )


def test_nothing_is_left_on_the_module_after_a_fit_or_an_error(tmp_path):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ArithmeticError("on purpose")
            return super().training_step(batch, batch_idx)

    for module, error in ((Classifier(), None), (Fails(), ArithmeticError)):
        callback = DomeCallback(rank=4)
        own = trainer(callback, tmp_path)
        if error is None:
            own.fit(module, loader())
        else:
            with pytest.raises(error):
                own.fit(module, loader())
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "training_step" not in vars(own.strategy)
        assert not callback.filter.is_attached
