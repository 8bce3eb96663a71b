import shutil
from inspect import signature

import pytest
import torch
import transformers
from loops import flat
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import dome
from dome.compression import ErrorFeedback, TopK
from dome.integrations.transformers import FILE, DomeTrainerCallback
from dome.reference import Dome

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own advice

VOCABULARY, LENGTH = 40, 7
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 10,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(kind=BertForSequenceClassification, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(BertConfig(**SIZES | options)).double()


def sentences(num=24, masked=False):
    """Sentences of different lengths, padded; labels of a class or of every word."""
    rng = torch.Generator().manual_seed(3)
    words = torch.randint(1, VOCABULARY, (num, LENGTH), generator=rng)
    lengths = torch.randint(2, LENGTH + 1, (num,), generator=rng)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = torch.randint(2, (num,), generator=rng)
    if masked:
        labels = words.where(mask.bool(), -100)
    columns = {"input_ids": words * mask, "attention_mask": mask, "labels": labels}
    return [{name: c[i] for name, c in columns.items()} for i in range(num)]


def batch(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def batches(rows, size):
    return [batch(rows[i : i + size]) for i in range(0, len(rows), size)]


def trainer(folder, model, callback, rows=None, **options):
    arguments = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 2,
    }
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_grad_norm=0.0,
        **arguments | {"seed": 0, **options},
    )

    # In the order of the rows, so that a plain loop can take the same ones.
    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    callbacks = callback if isinstance(callback, list) else [callback]
    data = sentences() if rows is None else rows
    return InOrder(
        model=model,
        args=args,
        train_dataset=data,
        callbacks=callbacks,
        data_collator=batch,
    )


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def plain(model, steps, make=sgd, rank=4, scale=None, clip=None, **options):
    """A plain loop over steps, each a list of micro-batches."""
    optimizer = make(model)
    grad_filter = dome.attach(model, optimizer, rank, **options)
    model.train()
    for micro in steps:
        for inputs in micro:
            loss = model(**inputs).loss
            (
                loss * (1 / len(micro) if scale is None else scale(inputs, micro))
            ).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    grad_filter.detach()
    return flat(model), grad_filter


def one_by_one(rows, size=4):
    return [[b] for b in batches(rows, size)]


def test_training_gives_the_numbers_of_the_plain_loop(tmp_path):
    model, callback = bert(), DomeTrainerCallback(rank=4)
    trainer(tmp_path, model, callback).train()
    expected, grad_filter = plain(bert(), one_by_one(sentences()))
    assert torch.equal(flat(model), expected)
    assert callback.filter.stats.fraction == grad_filter.stats.fraction
    assert callback.filter.stats.step == 6


class Logits(torch.nn.Module):
    """Takes words and mask as one tensor, which the slow twin can slice."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, both):
        words, mask = both.unbind(dim=1)
        return self.model(input_ids=words, attention_mask=mask).logits


def literal(model, rows, size, rank, loss_fn=cross_entropy):
    """Algorithm 1 with one backward a sample and SGD: the trained parameters (D,)."""
    sizes = [p.numel() for p in model.parameters()]
    start = dome.StreamingPower(sum(sizes), rank, dtype=torch.float64).basis.clone()
    twin = Dome(Logits(model), start)
    for b in batches(rows, size):
        both = torch.stack([b["input_ids"], b["attention_mask"]], dim=1)
        pieces = twin.filtered(loss_fn, both, b["labels"]).split(sizes)
        with torch.no_grad():
            for p, piece in zip(model.parameters(), pieces, strict=True):
                p.sub_(0.05 * piece.view(p.shape))
    return flat(model)


def test_training_agrees_with_algorithm_one_and_one_backward_a_sample(tmp_path):
    model = bert()
    # A rank that four samples determine: what a QR makes up beyond is anybody's.
    trainer(tmp_path, model, DomeTrainerCallback(rank=2)).train()
    torch.testing.assert_close(flat(model), literal(bert(), sentences(), 4, rank=2))


@pytest.mark.parametrize("divided_by", ["accumulation", "nothing"])
def test_accumulation_with_a_mean_loss_of_each_micro_batch(tmp_path, divided_by):
    # A classifier that takes any keyword is believed to divide by num_items_in_batch.
    # Transformers does not check, and then .grad is a sum over micro-batches.
    model = bert()
    if divided_by == "nothing" and "kwargs" not in signature(model.forward).parameters:
        pytest.skip("this version's classifiers take no other keywords")
    model.accepts_loss_kwargs = divided_by == "nothing"
    callback = DomeTrainerCallback(rank=4)
    trainer(tmp_path, model, callback, gradient_accumulation_steps=3).train()
    micro = batches(sentences(), 4)
    scale = 1.0 if divided_by == "nothing" else 1 / 3
    expected, _ = plain(bert(), [micro[:3], micro[3:]], scale=lambda *_: scale)
    torch.testing.assert_close(flat(model), expected)
    if divided_by == "accumulation":
        torch.testing.assert_close(flat(model), literal(bert(), sentences(), 12, 4))


def test_tied_embeddings_of_a_masked_language_model(tmp_path):
    rows = sentences(masked=True)
    model = bert(BertForMaskedLM)
    decoder = model.get_output_embeddings().weight
    assert decoder is model.get_input_embeddings().weight
    trainer(tmp_path, model, DomeTrainerCallback(rank=4), rows).train()
    expected, _ = plain(bert(BertForMaskedLM), one_by_one(rows))
    assert torch.equal(flat(model), expected)


def gpt():
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=10,
        n_embd=8,
        n_layer=1,
        n_head=2,
        **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).double()


def words_of(rows):
    """What the Trainer divides by; for this model it counts first words too."""
    return int((batch(rows)["labels"] != -100).sum())


def test_accumulation_with_a_mean_over_the_words_of_the_whole_step(tmp_path):
    rows = sentences(masked=True)
    model, callback = gpt(), DomeTrainerCallback(rank=4)
    trainer(tmp_path, model, callback, rows, gradient_accumulation_steps=2).train()
    again = gpt()
    optimizer = sgd(again)
    grad_filter = dome.attach(again, optimizer, rank=4)
    for i in range(0, len(rows), 8):
        words = words_of(rows[i : i + 8])
        for inputs in batches(rows[i : i + 8], 4):
            again(**inputs, num_items_in_batch=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(flat(model), flat(again))
    assert callback.filter.stats.fraction == grad_filter.stats.fraction


def test_a_sample_of_a_mean_over_words_is_a_sentences_share_of_the_gradient(tmp_path):
    rows = sentences(8, masked=True)

    def share(logits, labels):
        shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        # Times B: what the twin averages is then the gradient of the Trainer's loss.
        return 8 * cross_entropy(*shifted, reduction="sum") / words_of(rows)

    model = gpt()
    callback = DomeTrainerCallback(rank=3)
    trainer(tmp_path, model, callback, rows, gradient_accumulation_steps=2).train()
    expected = literal(gpt(), rows, 8, rank=3, loss_fn=share)
    # Transformers computes the loss of causal models in float32.
    torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-7)


def test_clipping_comes_before_the_filter_as_in_the_plain_loop(tmp_path):
    model = bert()
    own = trainer(tmp_path, model, DomeTrainerCallback(rank=4))
    own.args.max_grad_norm = 0.01
    own.train()
    expected, _ = plain(bert(), one_by_one(sentences()), clip=0.01)
    torch.testing.assert_close(flat(model), expected)


def adamw(model):
    # The Trainer leaves biases and norms out of weight decay; there is none here.
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.05)


def adafactor(model):
    return transformers.Adafactor(
        model.parameters(), lr=0.05, scale_parameter=False, relative_step=False
    )


@pytest.mark.parametrize(
    ("optim", "make"),
    [
        ("adamw_torch", adamw),
        ("adagrad", adagrad),
        ("rmsprop", rmsprop),
        ("adafactor", adafactor),
    ],
)
def test_every_choice_of_optimizer_is_filtered(optim, make, tmp_path):
    model = bert()
    trainer(tmp_path, model, DomeTrainerCallback(rank=4), optim=optim).train()
    expected, _ = plain(bert(), one_by_one(sentences()), make=make)
    unfiltered, _ = plain(bert(), one_by_one(sentences()), make=make, strength=0.0)
    torch.testing.assert_close(flat(model), expected)
    assert not torch.allclose(expected, unfiltered)


def filtered_with_memory():
    after = ErrorFeedback(TopK(rate=5))
    return DomeTrainerCallback(rank=4, update_every=2, warmup=1, after=after)


def saving(folder, callback, **options):
    own = trainer(folder, bert(), callback, optim="adamw_torch", **options)
    own.args.save_strategy = transformers.trainer_utils.SaveStrategy.STEPS
    own.args.save_steps = 2
    own.args.num_train_epochs = 2
    return own


def test_a_run_resumed_from_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    whole = saving(tmp_path, filtered_with_memory())
    whole.train()
    callback = filtered_with_memory()
    again = saving(tmp_path, callback)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert torch.equal(flat(again.model), flat(whole.model))
    assert callback.filter.stats.step == 12


def test_gradient_checkpointing_changes_no_number(tmp_path):
    weights = []
    # Transformers before 5 checkpoint in the reentrant way unless told otherwise.
    checkpointed = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    for options in ({}, checkpointed):
        # With dropout: what is computed again must draw what was drawn.
        model = bert(hidden_dropout_prob=0.3)
        callback = DomeTrainerCallback(rank=4)
        trainer(tmp_path, model, callback, **options).train()
        assert model.is_gradient_checkpointing == bool(options)
        weights.append(flat(model))
    assert torch.equal(weights[1], weights[0])


@pytest.mark.parametrize("kind", [BertForMaskedLM, GPT2LMHeadModel])
def test_gradient_checkpointing_in_a_plain_loop_changes_no_number(kind):
    weights = []
    for checkpointed in (False, True):
        model = bert(kind) if kind is BertForMaskedLM else gpt()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        steps = [[b] for b in batches(sentences(12, masked=True), 4)]
        plain(model, steps)
        weights.append(flat(model))
    assert torch.equal(weights[1], weights[0])


def test_reentrant_gradient_checkpointing_is_refused_by_name():
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match=r"'bert.*reentrant.*use_reentrant"):
        plain(model, [[b] for b in batches(sentences(4), 4)])


def test_a_checkpoint_from_another_place_must_be_named(tmp_path):
    whole = saving(tmp_path / "first", filtered_with_memory())
    whole.train()
    elsewhere = str(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "first" / "checkpoint-6", elsewhere)
    with pytest.raises(RuntimeError, match=r"at step 6, .* missing .none was found"):
        saving(tmp_path / "new", filtered_with_memory()).train(elsewhere)

    # A file of that step, but of another run.
    other = saving(tmp_path / "new", filtered_with_memory(), learning_rate=0.01)
    other.train()
    with pytest.raises(RuntimeError, match=r"checkpoint-6.* belongs to other"):
        saving(tmp_path / "new", filtered_with_memory()).train(elsewhere)

    callback = filtered_with_memory()
    callback._resume_from = elsewhere
    again = saving(tmp_path / "new", callback)
    again.train(elsewhere)
    assert torch.equal(flat(again.model), flat(whole.model))


def test_a_run_without_a_filter_may_go_on_with_a_new_one(tmp_path):
    saving(tmp_path, []).train()
    callback = DomeTrainerCallback(rank=4, resume_from="nothing")
    saving(tmp_path, callback).train(str(tmp_path / "checkpoint-6"))
    assert callback.filter.stats.step == 6


def test_a_checkpoint_of_the_model_alone_holds_no_filter(tmp_path):
    saving(tmp_path, DomeTrainerCallback(rank=4), save_only_model=True).train()
    assert (tmp_path / "checkpoint-6").is_dir()
    assert not (tmp_path / "checkpoint-6" / FILE).exists()


def test_what_the_filter_did_is_in_the_log(tmp_path):
    callback = DomeTrainerCallback(rank=4)
    own = trainer(tmp_path, bert(), callback)
    own.train()
    rows = [row for row in own.state.log_history if "loss" in row]
    assert len(rows) == 3
    assert rows[-1]["dome_fraction"] == callback.filter.stats.fraction
    assert {"dome_kept_norm", "dome_drift", "dome_seconds"} <= set(rows[-1])
    quiet = trainer(tmp_path, bert(), DomeTrainerCallback(rank=4, log_stats=False))
    quiet.train()
    assert not any("dome_fraction" in row for row in quiet.state.log_history)


def test_reporters_see_it_if_the_callback_goes_first(tmp_path):
    class Reporter(transformers.TrainerCallback):
        seen = ()

        def on_log(self, args, state, control, logs=None, **_):
            self.seen = (*self.seen, *logs)

    reporter = Reporter()
    own = trainer(tmp_path, bert(), [reporter, DomeTrainerCallback(rank=4)])
    callbacks = own.callback_handler.callbacks
    callbacks.insert(0, own.pop_callback(DomeTrainerCallback))
    own.train()
    assert "dome_fraction" in reporter.seen


def test_nothing_is_left_on_the_model_and_training_can_start_again(tmp_path):
    model, callback = bert(), DomeTrainerCallback(rank=4)
    own = trainer(tmp_path, model, callback)
    own.train()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not callback.filter.is_attached
    own.train()
    assert callback.filter.stats.step == 6


def test_several_processes_need_the_trainer(tmp_path, monkeypatch):
    own = trainer(tmp_path, bert(), DomeTrainerCallback(rank=4))
    monkeypatch.setattr(type(own.args), "world_size", 2)
    with pytest.raises(RuntimeError, match=r"set callback.trainer = trainer"):
        own.train()


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    callback = DomeTrainerCallback(rank=4)
    own = trainer(tmp_path, bert(), callback)
    own.create_optimizer()
    monkeypatch.setattr(type(own.args), "n_gpu", 2)
    with pytest.raises(ValueError, match="over 2 GPUs"):
        callback.on_train_begin(
            own.args, own.state, own.control, model=own.model, optimizer=own.optimizer
        )


def adapted():
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=2, target_modules=["query", "value"]
        )
        return peft.get_peft_model(bert(), config).double()


def test_adapters_are_filtered_alone(tmp_path):
    model, callback = adapted(), DomeTrainerCallback(rank=4)
    trainer(tmp_path, model, callback).train()
    expected, grad_filter = plain(adapted(), one_by_one(sentences()))
    assert torch.equal(flat(model), expected)
    before = dict(adapted().named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
    names = [name for name in callback.filter.state_dict() if "parameters." in name]
    assert names
    assert all("lora" in name or "classifier" in name for name in names)
    assert callback.filter.stats.fraction == grad_filter.stats.fraction
