import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import dome
from dome.parameters import Layout
from dome.samples import PerSample

pytestmark = pytest.mark.usefixtures("float64")


class Operator(nn.Module):
    """DeepONet: one function u a sample, the same grid for all."""

    def __init__(self):
        super().__init__()
        self.branch, self.trunk = nn.Linear(5, 4), nn.Linear(2, 4)

    def forward(self, u, grid):
        return self.branch(u).tanh() @ self.trunk(grid).tanh().T


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, class_scale, x):
        return self.layer(x) * class_scale


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 6), nn.Embedding(30, 6)

    def forward(self, ids, position_ids=None, head=None):
        h = self.words(ids)
        return h if position_ids is None else (h + self.places(position_ids)).tanh()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, left, right):
        return self.left(left), self.right(right)


def loss(out):
    return out.tanh().square().flatten(1).sum(1).mean()


def literal(model, call, num):
    layout = Layout(model)
    rows = [
        torch.autograd.grad(loss(call(slice(b, b + 1))) / num, layout.parameters)
        for b in range(num)
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def step(model, source, call, num, exact=True):
    model.zero_grad()
    loss(call(slice(None))).backward()
    rows = source.take()
    with source.paused():
        expected = literal(model, call, num)
    assert_close(rows, expected) if exact else None
    return rows


@pytest.mark.parametrize("sizes", [(32, 32, 20), (32, 20, 32), (1, 20, 32)])
def test_a_grid_as_long_as_the_last_batch_stays_a_grid(sizes):
    model, grid = Operator(), torch.randn(20, 2)
    source = PerSample(model, Layout(model))
    for num in sizes:
        u = torch.randn(num, 5)
        if num == 20 and sizes[0] == 1:
            # The first batch of more than one: sizes tell nothing.
            with pytest.raises(RuntimeError, match=r"'grid'.*samples_in=\('u',\)"):
                model(u, grid)
        else:
            step(model, source, lambda b, u=u: model(u[b], grid), num)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_grid_as_long_as_the_first_batch_is_refused_and_declared(by_name):
    model, grid = Operator(), torch.randn(20, 2)
    source = PerSample(model, Layout(model))
    u = torch.randn(20, 5)
    with pytest.raises(RuntimeError, match=r"input 'grid' has 20.*samples_in=\('u',\)"):
        model(grid=grid, u=u) if by_name else model(u, grid)
    source.detach()
    source = PerSample(model, Layout(model), samples_in="u")
    for num in (20, 32, 20, 1):
        u = torch.randn(num, 5)
        step(model, source, lambda b, u=u: model(grid=grid, u=u[b]), num)


def test_the_filter_works_on_after_a_refused_step():
    model, grid = Operator(), torch.randn(20, 2)
    source, refusals = PerSample(model, Layout(model)), 0
    for num in (32, 20, 20, 32):
        u = torch.randn(num, 5)
        step(model, source, lambda b, u=u: model(u[b], grid), num)
    source.detach()
    source = PerSample(model, Layout(model))
    for num in (20, 32, 20, 32):
        u = torch.randn(num, 5)
        try:
            step(model, source, lambda b, u=u: model(u[b], grid), num)
        except RuntimeError as error:
            refusals += "samples_in" in str(error)
    assert refusals == 1  # from then on the sizes have told


def test_position_ids_as_long_as_the_batch_are_refused_by_name():
    model, T = Positions(), 7
    source, places = PerSample(model, Layout(model)), torch.arange(T)
    with pytest.raises(RuntimeError, match=r"'position_ids'.*samples_in=\('ids',\)"):
        model(torch.randint(9, (T, T)), places)
    source.detach()
    source = PerSample(model, Layout(model), samples_in=("ids",))
    for num in (T, 4):
        ids = torch.randint(9, (num, T))
        step(model, source, lambda b, ids=ids: model(ids[b], places), num)


@pytest.mark.parametrize("num", [3, 12])
def test_a_scale_of_classes_in_front_is_not_taken_for_samples(num):
    model, scale, x = Scaled(), torch.rand(3), torch.randn(num, 4)
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"samples_in=\(.*'x'"):
        model(scale, x)
    source.detach()
    source = PerSample(model, Layout(model), samples_in=("x",))
    step(model, source, lambda b: model(scale, x[b]), num)


def test_inputs_that_never_meet_are_declared():
    model, x, y = Towers(), torch.randn(5, 3), torch.randn(5, 3)
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"'right'.*never meet.*samples_in"):
        model(x, y)
    source.detach()
    source = PerSample(model, Layout(model), samples_in=("left", "right"))

    def call(b):
        left, right = model(x[b], y[b])
        return left * right

    step(model, source, call, 5)


def test_inputs_that_are_added_need_no_declaration():
    model = Positions()
    source = PerSample(model, Layout(model))
    for num in (7, 7, 4, 1):
        ids, places = torch.randint(9, (num, 7)), torch.randint(30, (num, 7))
        call = lambda b, i=ids, p=places: model(position_ids=p[b], ids=i[b])  # noqa: E731
        step(model, source, call, num)


def test_roles_are_kept_for_every_way_a_model_is_called():
    model = Positions()
    source = PerSample(model, Layout(model))
    for num in (4, 7, 1, 4):
        ids, more = torch.randint(9, (num, 7)), torch.randint(9, (num, 7))
        places = torch.arange(7)

        def call(b, i=ids, m=more, p=places):
            return model(i[b], position_ids=p) + model(m[b])

        step(model, source, call, num)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Operator()

    def forward(self, batch, *, scale=1.0):
        return scale * self.inner(batch["ids"][0], batch["grid"])


def test_nested_inputs_are_named_by_their_path():
    model, grid, u = Nested(), torch.randn(6, 2), torch.randn(6, 5)
    source = PerSample(model, Layout(model))
    wanted = r"\"batch\['grid'\]\".*samples_in=\(\"batch\['ids'\]\[0\]\",\)"
    with pytest.raises(RuntimeError, match=wanted):
        model({"ids": (u,), "grid": grid})
    source.detach()
    for name in ('batch["ids"]', "batch['ids'][0]"):
        source = PerSample(model, Layout(model), samples_in=(name,))
        step(model, source, lambda b: model({"grid": grid, "ids": (u[b],)}), 6)
        source.detach()


def test_names_are_checked_when_attached():
    model = Operator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"'v', which forward\(\) of Operator.*u, grid"
    ):
        dome.attach(model, optimizer, rank=1, samples_in=("v",))
    with pytest.raises(TypeError, match="names of the inputs"):
        dome.attach(model, optimizer, rank=1, samples_in=(0,))
    with pytest.raises(ValueError, match="names no input"):
        dome.attach(model, optimizer, rank=1, samples_in=())
    with pytest.raises(ValueError, match=r"samples_in needs samples=.per_sample."):
        dome.attach(model, optimizer, 1, samples="microbatch", samples_in=("u",))
    with dome.GradientFilter(model, 1, samples_in="u") as grad_filter:
        with pytest.raises(ValueError, match=r"has samples_in=\('u',\)"):
            PerSample(model, Layout(model), samples_in="grid")
        grid = torch.randn(20, 2)
        loss(model(torch.randn(20, 5), grid)).backward()
        grad_filter.step()


def test_a_declared_input_of_another_size_is_an_error():
    model = Towers()
    source = PerSample(model, Layout(model), samples_in=("left", "right"))
    with pytest.raises(RuntimeError, match=r"input 'right' of shape \(4, 3\)"):
        model(torch.randn(5, 3), torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"none of the inputs.*\['args\[0\]'|'left'"):
        model(torch.randn(5, 3), torch.randn(4, 3))
    source.detach()


def test_watched_parts_have_roles_of_their_own():
    model, u, grid = Operator(), torch.randn(6, 5), torch.randn(6, 2)

    def parts(b):
        return model.branch(u[b]).tanh() @ model.trunk(grid).tanh().T

    source = PerSample(model, Layout(model))
    wanted = r"'inputs\[1\]'.*samples_in"
    with pytest.raises(RuntimeError, match=wanted), source.watch((u, grid)):
        parts(slice(None))
    for inputs, named, names in (
        ((u, grid), {}, ("inputs[0]",)),
        ((), {"grid": grid, "u": u}, ("u",)),
    ):
        with source.watch(inputs, named, names):
            loss(parts(slice(None))).backward()
        rows = source.take()
        with source.paused():
            assert_close(rows, literal(model, parts, 6))
        model.zero_grad()
    source.detach()
    grad_filter = dome.GradientFilter(model, 1, samples_in=("u",))
    wanted = r"none of the inputs.*'inputs\[0\]'"
    with pytest.raises(RuntimeError, match=wanted), grad_filter.watch(u, grid):
        pass
    with grad_filter.watch(u=u, grid=grid):
        loss(parts(slice(None))).backward()
    grad_filter.step()
    grad_filter.detach()


def test_a_mask_as_long_as_the_batch_is_no_error():
    model = nn.TransformerEncoderLayer(4, 1, 5, dropout=0.0, batch_first=True)
    source, T = PerSample(model, Layout(model)), 6
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    for num in (T, 4, T):
        x = torch.randn(num, T, 4)
        step(model, source, lambda b, x=x: model(x[b], mask), num)


def test_class_descriptions_paired_with_as_many_samples_are_refused():
    class Matching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x, descriptions):
            return F.linear(self.layer(x), self.layer(descriptions))

    model, texts = Matching(), torch.randn(5, 3)
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"'descriptions'.*'linear' does not bring"):
        model(torch.randn(5, 3), texts)
    source.detach()


def test_a_context_that_is_pooled_before_it_meets_samples_is_refused():
    class Context(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x, context):
            return self.layer(x) * self.layer(context).mean(0)

    model = Context()
    source = PerSample(model, Layout(model))
    with pytest.raises(RuntimeError, match=r"'context'.*'mul'|'context'.*samples_in"):
        model(torch.randn(5, 3), torch.randn(5, 3))
    source.detach()
    source = PerSample(model, Layout(model), samples_in="x")
    context, x = torch.randn(5, 3), torch.randn(5, 3)
    step(model, source, lambda b: model(x[b], context), 5)


def test_states_of_as_many_layers_as_samples_are_followed():
    class Carried(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(3, 6, 2, batch_first=True)

        def forward(self, x, h, c):
            return self.layer(x, (h, c))[0]

    model = Carried()
    source = PerSample(model, Layout(model))
    for num in (2, 4, 2):
        x, h, c = torch.randn(num, 5, 3), *torch.randn(2, 2, num, 6)
        call = lambda b, x=x, h=h, c=c: model(x[b], h[:, b], c[:, b])  # noqa: E731
        step(model, source, call, num)


def test_a_number_in_front_is_not_taken_for_samples():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, t, x):
            return t * self.layer(x)

    model, x = Timed(), torch.randn(5, 3)
    source = PerSample(model, Layout(model))
    step(model, source, lambda b: model(torch.tensor(2.0), x[b]), 5)


def test_one_tensor_under_two_names_has_one_role():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x, xs):
            return self.layer(x) + sum(self.layer(y).tanh() for y in xs)

    model, x = Two(), torch.randn(5, 3)
    source = PerSample(model, Layout(model))

    def call(b):
        own = x[b]
        return model(own, [own, own])

    step(model, source, call, 5)


class Illustrated(nn.Module):
    """Sentences in which the word 0 stands for a picture."""

    def __init__(self):
        super().__init__()
        self.words, self.eye = nn.Embedding(9, 4), nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, ids, pictures):
        seen = self.eye(pictures).amax((2, 3))
        h = self.words(ids).masked_scatter((ids == 0)[..., None], seen)
        return self.head(h.tanh().cumsum(1))


def sentences(num, counts):
    ids = torch.arange(7).repeat(num, 1) + 1
    for b, count in enumerate(counts):
        ids[b, torch.randperm(7)[:count]] = 0
    return ids, torch.randn(sum(counts), 3, 5, 5)


def test_a_declared_input_may_have_several_entries_for_each_sample():
    model, names = Illustrated(), ("ids", "pictures")
    source = PerSample(model, Layout(model), samples_in=names)
    for num, each in ((4, 2), (3, 2), (2, 3), (5, 1), (1, 2)):
        ids, pictures = sentences(num, [each] * num)

        def call(b, ids=ids, pictures=pictures, num=num):
            own = pictures.unflatten(0, (num, -1))[b].flatten(0, 1)
            return model(ids[b], own)

        step(model, source, call, num)
    source.detach()
    report = dome.verify(
        model, lambda z: z.square().mean(), sentences(4, [2] * 4), samples_in=names
    )
    assert report.ok, report


def test_entries_that_go_to_another_sample_than_their_place_says_are_refused():
    model = Illustrated()
    source = PerSample(model, Layout(model), samples_in=("ids", "pictures"))
    model(*sentences(4, [2] * 4))
    with pytest.raises(RuntimeError, match="mixed by"):
        model(*sentences(4, [1, 3, 2, 2]))
    source.detach()


def test_several_entries_for_each_sample_and_a_dimension_as_long_are_told_apart():
    model = Illustrated()
    source = PerSample(model, Layout(model), samples_in=("ids", "pictures"))
    with pytest.raises(RuntimeError, match=r"along dimension 1, or 2 entries of each"):
        model(*sentences(3, [2] * 3))
    source.detach()


def test_a_table_in_front_is_told_by_never_changing():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, table, x):
            return self.layer(table) @ self.layer(x).T

    model, table = Table(), torch.randn(7, 3)
    source = PerSample(model, Layout(model))
    model(table, torch.randn(5, 3))
    with pytest.raises(RuntimeError, match=r"'table' was taken.*samples_in=\('x',\)"):
        model(table, torch.randn(5, 3))
    source.detach()
    source = PerSample(model, Layout(model), samples_in="x")
    for _ in range(2):
        x = torch.randn(5, 3)
        step(model, source, lambda b, x=x: model(table, x[b]).T, 5)


def test_one_batch_again_and_again_is_no_table():
    model, u, grid = Operator(), torch.randn(6, 5), torch.randn(9, 2)
    source = PerSample(model, Layout(model))
    for _ in range(3):
        step(model, source, lambda b: model(u[b], grid), 6)
