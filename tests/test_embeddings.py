"""A filter that keeps the words in a batch, against its twin that keeps all words."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dome
from dome.parameters import Layout
from dome.samples.per_sample import PerSample
from dome.samples.store import group

WORDS, WIDTH, CLASSES, TEXTS, LENGTH, RANK = 60, 3, 4, 9, 5, 4
# Sums over the words of a batch and over all words round in another order.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Reader(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # columns on both sides of the words'
        self.words = table
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, texts):
        x = self.words(texts)
        x = x if x.dim() == 2 else x.mean(dim=1)
        return self.last(torch.tanh(self.first(x)))


class Tied(Reader):
    def forward(self, texts):
        x = torch.tanh(self.first(self.words(texts).mean(dim=1)))
        return (x @ self.words.weight.T)[:, :CLASSES]


class Bare(Reader):
    def forward(self, texts):
        x = nn.functional.embedding(texts, self.words.weight)
        return self.last(torch.tanh(self.first(x).mean(dim=1)))


MODELS = {
    "Embedding": lambda: Reader(nn.Embedding(WORDS, WIDTH)),
    "padding_idx": lambda: Reader(nn.Embedding(WORDS, WIDTH, padding_idx=1)),
    "EmbeddingBag": lambda: Reader(nn.EmbeddingBag(WORDS, WIDTH)),
    "tied": lambda: Tied(nn.Embedding(WORDS, WIDTH)),
    "sparse=True": lambda: Reader(nn.Embedding(WORDS, WIDTH, sparse=True)),
    "EmbeddingBag, sparse=True": lambda: Reader(
        nn.EmbeddingBag(WORDS, WIDTH, sparse=True)
    ),
    "called as a function": lambda: Bare(nn.Embedding(WORDS, WIDTH)),
    "most words in every batch": lambda: Reader(nn.Embedding(14, WIDTH)),
}
OPTIONS = {
    "global": {},
    "layer-wise": {"layout": "layerwise", "rank": 2},
    "layer-wise stream": {"layout": "layerwise", "rank": 2, "stream": True},
    "svd": {"tracker": "svd"},
    "oversample": {"oversample": 2, "rank": 2},
    "forget": {"forget": 0.2},
    "update_every": {"update_every": 2},
    "direction_rank": {"direction_rank": 2},
    "own tracker": {
        "tracker": lambda dim, rank: dome.StreamingPower(dim, rank, dtype=torch.float64)
    },
}


def batches(num, num_words, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(num):
        some = torch.randperm(num_words, generator=rng)[:12]
        picks = torch.randint(len(some), (TEXTS, LENGTH), generator=rng)
        yield some[picks], torch.randint(CLASSES, (TEXTS,), generator=rng)


def trained(make, options, large, monkeypatch, num_steps=6, num_micro=1):
    monkeypatch.setattr(group, "LARGE", large)
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    grad_filter = dome.attach(model, optimizer, **({"rank": RANK} | options))
    stream = batches(num_steps * num_micro, model.words.num_embeddings)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(num_micro):
            texts, classes = next(stream)
            (cross_entropy(model(texts), classes) / num_micro).backward()
        optimizer.step()
    return model, grad_filter


def assert_same(ours, twin):
    for p, q in zip(ours[0].parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, **CLOSE)
    found, expected = (run[1].stats.kept_norm for run in (ours, twin))
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("model", MODELS)
def test_keeping_the_words_of_a_batch_changes_nothing(model, monkeypatch):
    runs = [trained(MODELS[model], {}, large, monkeypatch) for large in (1, 1 << 60)]
    assert_same(*runs)


@pytest.mark.parametrize("options", OPTIONS)
def test_nor_with_any_option(options, monkeypatch):
    make, chosen = MODELS["Embedding"], OPTIONS[options]
    runs = [trained(make, chosen, large, monkeypatch) for large in (1, 1 << 60)]
    assert_same(*runs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_filtered_as_dense_ones(kind, options, monkeypatch):
    def run(sparse):
        def make():
            return Reader(kind(WORDS, WIDTH, sparse=sparse))

        return trained(make, OPTIONS[options], 1, monkeypatch)

    assert_same(run(True), run(False))


def test_nor_where_gradients_are_accumulated(monkeypatch):
    make = MODELS["Embedding"]
    runs = [trained(make, {}, n, monkeypatch, num_micro=2) for n in (1, 1 << 60)]
    assert_same(*runs)


@pytest.mark.parametrize("calls", ["once", "two batches", "two backward passes"])
@pytest.mark.parametrize("model", MODELS)
def test_the_words_that_are_kept_are_all_there_is(model, calls, monkeypatch):
    monkeypatch.setattr(group, "LARGE", 1)
    torch.manual_seed(0)
    model = MODELS[model]().double()
    source = PerSample(model, Layout(model))
    expected = []
    for texts, classes in batches(2 if calls == "two batches" else 1, 14):
        again = calls == "two backward passes"
        loss = cross_entropy(model(texts), classes, reduction="sum")
        loss.backward(retain_graph=again)
        if again:
            loss.backward()
        rows = dome.per_sample_gradients(model, cross_entropy, texts, classes)
        expected.append(rows * (2 if again else 1))
    found = source.take_compact()
    torch.testing.assert_close(found.written_out(), torch.cat(expected))


def test_words_that_no_sample_has_take_no_room(monkeypatch):
    monkeypatch.setattr(group, "LARGE", 1)
    model = MODELS["Embedding"]()
    source = PerSample(model, Layout(model))
    ((texts, classes),) = batches(1, WORDS)
    cross_entropy(model(texts), classes).backward()
    first, table, last = source.take_compact().parts
    assert table.words.tolist() == texts.unique().tolist()
    assert table.rows.shape == (TEXTS, len(texts.unique()) * WIDTH)
    # As columns of one buffer, which has none for the embedding.
    assert (
        first.rows.stride(0)
        == last.rows.stride(0)
        == first.rows.shape[1] + last.rows.shape[1]
    )


def test_a_tied_embedding_has_its_rows_in_the_buffer_from_the_second_step_on(
    monkeypatch,
):
    monkeypatch.setattr(group, "LARGE", 1)
    model = MODELS["tied"]()
    source = PerSample(model, Layout(model))
    for texts, classes in batches(2, WORDS):
        model.zero_grad()
        cross_entropy(model(texts), classes).backward()
        found = source.take_compact()
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.sum(dim=0), Layout(model).gather())


@pytest.mark.parametrize(
    "options", [{}, {"update_every": 3}, {"update_every": 3, "warmup": 4}]
)
def test_a_run_resumes_bit_for_bit(options, monkeypatch, tmp_path):
    monkeypatch.setattr(group, "LARGE", 1)
    # Of the same words, also where no sample is taken in between.
    stream = list(batches(1, WORDS)) * 8

    def steps(model, optimizer, some):
        for texts, classes in some:
            optimizer.zero_grad()
            cross_entropy(model(texts), classes).backward()
            optimizer.step()

    def started():
        torch.manual_seed(0)
        model = MODELS["Embedding"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, dome.attach(model, optimizer, RANK, **options)

    model, optimizer, grad_filter = started()
    steps(model, optimizer, stream[:4])
    torch.save([model.state_dict(), grad_filter.state_dict()], tmp_path / "state.pt")
    steps(model, optimizer, stream[4:])
    twin, optimizer, resumed = started()
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    twin.load_state_dict(weights)
    resumed.load_state_dict(state)
    steps(twin, optimizer, stream[4:])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_penalty_on_words_that_no_sample_has_is_filtered_too(monkeypatch):
    # The gradient then is not zero where all samples are.
    def final(large):
        monkeypatch.setattr(group, "LARGE", large)
        torch.manual_seed(0)
        model = MODELS["Embedding"]().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        dome.attach(model, optimizer, RANK, ignore_penalty=True)
        for texts, classes in batches(6, WORDS):
            optimizer.zero_grad()
            penalty = model.words.weight.square().sum()
            (cross_entropy(model(texts), classes) + 0.1 * penalty).backward()
            optimizer.step()
        return model.words.weight

    torch.testing.assert_close(final(1), final(1 << 60), **CLOSE)
