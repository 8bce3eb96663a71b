import copy
import warnings

import pytest
import torch
from models import batches, small_classifier
from torch import nn
from torch.nn.functional import cross_entropy

import dome

SAID = "held at zero"

LAYOUTS = {
    "global": {},
    "svd": {"tracker": "svd"},
    "layer-wise": {"layout": "layerwise"},
    "ranks by layer": {"layout": "layerwise", "rank": {"0": 3}},
    "stream": {"stream": True, "layout": "layerwise"},
    "low rank": {"direction_rank": 2},
    "layer-wise, low rank": {"direction_rank": 2, "layout": "layerwise"},
    "low rank, then a stage": {"direction_rank": 2, "after": lambda g: 2 * g},
    "half strength": {"strength": 0.5},
    "warm-up": {"warmup": 3},
    "now and then": {"update_every": 3},
    "micro-batches": {"samples": "microbatch"},
    "micro-batches, low rank": {"samples": "microbatch", "direction_rank": 2},
    "16 bits": {"basis_dtype": torch.bfloat16},
}


def hooked(p, mask):
    p.register_hook(lambda g: g * mask)


def hooked_after(p, mask):
    def keep(p):
        p.grad *= mask

    p.register_post_accumulate_grad_hook(keep)


def by_hand(p, mask):
    del p, mask


def half(p, seed=0):
    """A mask with a half of ones."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.rand(p.shape, generator=rng) < 0.5).to(p)


def stepped(model, optimizer, data, masks=None, passes=2):
    for x, y in data:
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(passes), y.chunk(passes), strict=True):
            (cross_entropy(model(x_part), y_part) / passes).backward()
        for p, mask in (masks or {}).items():
            p.grad *= mask
        optimizer.step()


@pytest.mark.parametrize("way", [hooked, hooked_after, by_hand])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_entries_under_a_mask_on_the_gradient_stay_as_they_are(
    way, early, options, rng
):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = {p: half(p) for p in (model[0].weight, model[2].bias)}
    masks = masks if early else {model[2].weight: half(model[2].weight)}
    before = copy.deepcopy(model.state_dict())
    if early:
        for p, mask in masks.items():
            way(p, mask)
    dome.attach(model, optimizer, **{"rank": 4} | options)
    if not early:
        for p, mask in masks.items():
            way(p, mask)
    # A stream has used the samples of a pass when it ends.
    passes = 1 if options == LAYOUTS["stream"] else 2
    masks_by_hand = masks if way is by_hand else None
    with pytest.warns(RuntimeWarning, match=SAID):
        stepped(model, optimizer, batches(rng, 8), masks_by_hand, passes)
    for name, p in model.named_parameters():
        moved = (p != before[name]).to(p)
        assert torch.equal(moved, masks.get(p, torch.ones_like(p))), name


def test_all_else_is_algorithm_one(rng):
    model = small_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_filter = dome.attach(model, optimizer, rank=4)
    mask = half(model[0].weight)
    hooked(model[0].weight, mask)
    (x, y), *_ = batches(rng, 1)
    cross_entropy(model(x), y).backward()
    g = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    with pytest.warns(RuntimeWarning, match=r"62 entries .* '0.weight'.* held at zero"):
        optimizer.step()
    U = grad_filter.trackers["all"].basis
    expected = g - U @ (U.T @ g)
    expected[: mask.numel()][mask.reshape(-1) == 0] = 0
    here = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(here, expected)
    kept = expected.norm() / g.norm()
    torch.testing.assert_close(grad_filter.stats.kept_norm, float(kept))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(dim=1))


def words(rng, num, vocabulary=30):
    for _ in range(num):
        x = torch.randint(vocabulary, (8, 5), generator=rng)
        yield x, torch.randint(3, (8,), generator=rng)


def word_model(seed=0, **options):
    torch.manual_seed(seed)
    model = Words().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, dome.attach(model, optimizer, **{"rank": 4} | options)


@pytest.mark.filterwarnings("ignore:.*held at zero")
@pytest.mark.parametrize("options", [{}, {"direction_rank": 2}, {"update_every": 2}])
def test_frozen_words_stay_in_batches_that_do_not_have_them(options, rng):
    model, optimizer, _ = word_model(**options)
    frozen = torch.ones(30, 1, dtype=torch.float64)
    frozen[:20] = 0
    hooked(model.embedding.weight, frozen)
    first, *data = words(rng, 9)
    stepped(model, optimizer, [first], passes=1)
    seen = first[0].unique()
    seen = seen[seen < 20]
    before = model.embedding.weight.detach().clone()
    stepped(model, optimizer, data, passes=1)
    after = model.embedding.weight.detach()
    assert torch.equal(after[seen], before[seen])
    assert not torch.equal(after[20:], before[20:])


@pytest.mark.parametrize("options", [{}, {"direction_rank": 2}])
def test_rows_that_no_sample_touches_follow_algorithm_one(options, rng):
    model, optimizer, _ = word_model(**options)
    stepped(model, optimizer, words(rng, 3))
    before = model.embedding.weight.detach().clone()
    stepped(model, optimizer, words(rng, 1, vocabulary=10))
    moved = (model.embedding.weight.detach() != before).any(dim=1)
    assert moved[10:].any()


def test_an_entry_whose_gradients_cancel_is_not_held(rng):
    model = nn.Linear(1, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    grad_filter = dome.attach(model, optimizer, rank=1)
    model(torch.ones(2, 1)).mul(torch.tensor([1.0, 2.0])).mean(0).sum().backward()
    model(-torch.ones(3, 1)).mul(torch.tensor([1.0, 4.0])).mean(0).sum().backward()
    g = model.weight.grad.reshape(-1).clone()
    assert g[0] == 0 != g[1]
    optimizer.step()
    U = grad_filter.trackers["all"].basis
    torch.testing.assert_close(model.weight.grad.reshape(-1), g - U @ (U.T @ g))
    assert model.weight.grad[0] != 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_that_is_thrown_away_holds_nothing(set_to_none, rng):
    runs = []
    for thrown in (False, True):
        model, optimizer, _ = word_model()
        data = torch.Generator().manual_seed(3)
        stepped(model, optimizer, words(data, 3))
        (x, y), *_ = words(data, 1)
        if thrown:
            cross_entropy(model(x), y).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
        stepped(model, optimizer, words(data, 2, vocabulary=5))
        runs.append(model.embedding.weight.detach())
    torch.testing.assert_close(*runs)


def test_a_gradient_that_is_set_to_none_or_zero_for_a_while_holds_nothing_later(rng):
    model, optimizer, _ = word_model()
    for x, y in words(rng, 2):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        model.embedding.weight.grad = None
        optimizer.step()
    before = model.embedding.weight.detach().clone()
    stepped(model, optimizer, words(rng, 4, vocabulary=10))
    assert (model.embedding.weight.detach() != before)[10:].any()


@pytest.mark.filterwarnings("ignore:.*held at zero")
def test_entries_that_are_let_go_are_filtered_again(rng):
    model, optimizer, grad_filter = word_model()
    handle = model.embedding.weight.register_hook(lambda g: g * 0)
    stepped(model, optimizer, words(rng, 3))
    handle.remove()
    before = model.embedding.weight.detach().clone()
    stepped(model, optimizer, words(rng, 5))
    assert (model.embedding.weight.detach() != before).any(dim=1).all()
    assert "held" not in grad_filter.state_dict()


def test_a_plain_run_says_nothing_and_saves_nothing(rng):
    model, optimizer, grad_filter = word_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(model, optimizer, words(rng, 6))
    assert "held" not in grad_filter.state_dict()


def test_it_is_said_once(rng):
    model, optimizer, _ = word_model()
    hooked(model.head.weight, half(model.head.weight))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(model, optimizer, words(rng, 4))
    assert len([w for w in caught if SAID in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:.*held at zero")
def test_a_run_with_frozen_words_resumes_bit_for_bit(rng):
    def started():
        model, optimizer, grad_filter = word_model()
        hooked(model.embedding.weight, half(model.embedding.weight))
        return model, optimizer, grad_filter

    data = list(words(rng, 8))
    model, optimizer, grad_filter = started()
    stepped(model, optimizer, data[:4])
    saved = copy.deepcopy((model.state_dict(), grad_filter.state_dict()))
    stepped(model, optimizer, data[4:])
    other, other_optimizer, other_filter = started()
    other.load_state_dict(saved[0])
    other_filter.load_state_dict(saved[1])
    stepped(other, other_optimizer, data[4:])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:.*held at zero")
def test_a_state_with_another_number_of_entries_is_refused(rng):
    model, optimizer, grad_filter = word_model()
    hooked(model.embedding.weight, half(model.embedding.weight))
    stepped(model, optimizer, words(rng, 2))
    state = grad_filter.state_dict()
    with pytest.raises(ValueError, match="'held' in the state"):
        grad_filter.load_state_dict(state | {"held": state["held"][1:]})


def test_gradients_of_autograd_grad_hold_nothing(rng):
    model, optimizer, _ = word_model()
    stepped(model, optimizer, words(rng, 3))
    before = model.embedding.weight.detach().clone()
    optimizer.zero_grad(set_to_none=False)
    for (x, y), _ in zip(words(rng, 2, vocabulary=10), range(2), strict=True):
        loss = cross_entropy(model(x), y)
        loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = next(words(rng, 1))
        loss = cross_entropy(model(x), y)
        torch.autograd.grad(loss, list(model.parameters()))
        optimizer.step()
    assert (model.embedding.weight.detach() != before)[10:].any()


def test_a_step_with_a_gradient_of_zeros_holds_nothing(rng):
    model, optimizer, grad_filter = word_model()
    stepped(model, optimizer, words(rng, 3))
    (x, y), *_ = words(rng, 1)
    cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.0)
    optimizer.step()
    assert "held" not in grad_filter.state_dict()


def test_detaching_removes_the_hooks_on_parameters(rng):
    model, optimizer, grad_filter = word_model()
    stepped(model, optimizer, words(rng, 2))
    grad_filter.detach()
    assert not any(p._backward_hooks for p in model.parameters())
