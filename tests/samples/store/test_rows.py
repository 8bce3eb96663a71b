import pytest
import torch
import torch.nn.functional as F
from samples.loop import per_sample_loop, sum_loss
from torch.testing import assert_close

from dome.parameters import Layout

pytestmark = pytest.mark.usefixtures("float64")


def backward(model, x):
    sum_loss(model(x)).backward()


def test_rows_sum_to_the_gradient_for_a_mean_loss(model, source):
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    F.cross_entropy(model(x), y).backward()
    rows = source.take()
    assert_close(rows.sum(0), Layout(model).gather())
    source.detach()
    for i in range(5):
        (expected,) = per_sample_loop(
            model, [x[i : i + 1]], loss=lambda z, i=i: F.cross_entropy(z, y[i : i + 1])
        )
        assert_close(5 * rows[i], expected)


def test_take_hands_over_and_forgets(model, source):
    backward(model, torch.randn(4, 3))
    assert source.take().shape == (4, 26)
    model.zero_grad()
    assert source.take() is None


def test_an_empty_batch_has_no_rows_and_takes_none_away(model, source):
    empty = model(torch.randn(0, 3)).sum()
    empty.backward()
    assert source.take() is None
    backward(model, torch.randn(4, 3))
    model(torch.randn(0, 3)).sum().backward()
    assert source.take().shape == (4, 26)


def test_one_buffer_is_kept_from_step_to_step(model, source):
    places = set()
    for size in (6, 6, 4, 6):
        model.zero_grad()
        backward(model, torch.randn(size, 3))
        rows = source.take()
        assert rows.shape == (size, 26)
        places.add(rows.data_ptr())
    assert len(places) == 1


def test_reused_buffer_does_not_remember_a_layer_that_is_skipped(model, source):
    x = torch.randn(4, 3)
    backward(model, x)
    source.take()
    model.zero_grad()
    model[0].requires_grad_(False)
    backward(model, x)
    rows = source.take()
    assert_close(rows[:, :16], torch.zeros(4, 16))
    assert rows[:, 16:].abs().sum() > 0


def test_accumulated_batches_are_stacked_even_if_uneven(model, source):
    x = torch.randn(7, 3)
    backward(model, x[:4])
    backward(model, x[4:])
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_forwards_of_equal_size_before_one_backward_add_row_by_row(model, source):
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    (sum_loss(model(x)) + sum_loss(model(y))).backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]) + per_sample_loop(model, [y]))


def test_forwards_of_unequal_size_before_one_backward_are_stacked(model, source):
    x, y = torch.randn(4, 3), torch.randn(2, 3)
    (sum_loss(model(x)) + sum_loss(model(y))).backward()
    rows = source.take()
    source.detach()
    each = [per_sample_loop(model, [x]), per_sample_loop(model, [y])]
    assert sorted([len(each[0]), len(each[1])]) == [2, 4]
    order = each if torch.allclose(rows[:4], each[0]) else each[::-1]
    assert_close(rows, torch.cat(order))


def test_forwards_of_8_8_and_4_before_one_backward_are_12_samples(model, source):
    x, y, z = torch.randn(8, 3), torch.randn(8, 3), torch.randn(4, 3)
    sum(sum_loss(model(part)) for part in (x, y, z)).backward()
    rows = source.take()
    source.detach()
    pairs = per_sample_loop(model, [x]) + per_sample_loop(model, [y])
    assert len(rows) == 12
    # Autograd goes backwards: the last pass comes first.
    assert_close(rows, torch.cat([per_sample_loop(model, [z]), pairs]))


def test_backward_twice_through_one_graph_is_about_the_same_samples(model, source):
    x = torch.randn(4, 3)
    output = model(x)
    sum_loss(output).backward(retain_graph=True)
    output.square().sum().backward()
    rows, total = source.take(), Layout(model).gather()
    source.detach()
    both = per_sample_loop(model, [x], loss=lambda z: sum_loss(z) + z.square().sum())
    assert_close(rows, both)
    assert_close(rows.sum(0), total)


def test_a_graph_that_goes_on_from_an_earlier_one_adds_to_its_samples(source, model):
    # Truncated backpropagation through time: the second pass reaches into the first.
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    first = model(x)
    sum_loss(first).backward(retain_graph=True)
    second = model(y) * first
    sum_loss(second).backward()
    rows, total = source.take(), Layout(model).gather()
    assert rows.shape == (4, 26)
    assert_close(rows.sum(0), total)


def test_backward_of_one_graph_in_two_steps_is_two_batches(model, source):
    loss = sum_loss(model(torch.randn(4, 3)))
    loss.backward(retain_graph=True)
    first = source.take().clone()
    model.zero_grad()
    loss.backward()
    assert_close(source.take(), first)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_rows_of_a_skipped_step_are_dropped_after_zero_grad(model, source, set_to_none):
    backward(model, torch.randn(4, 3))
    model.zero_grad(set_to_none=set_to_none)
    x = torch.randn(3, 3)
    backward(model, x)
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_zero_grad_between_forward_and_backward_drops_the_rows_before(model, source):
    backward(model, torch.randn(4, 3))
    loss = sum_loss(model(torch.randn(3, 3)))
    model.zero_grad()
    loss.backward()
    assert len(source.take()) == 3


def test_discard_forgets(model, source):
    backward(model, torch.randn(4, 3))
    source.discard()
    model.zero_grad()
    assert source.take() is None


def test_unarmed_passes_cost_and_leave_nothing(model, source):
    source.arm(False)
    output = model(torch.randn(4, 3))
    assert "Linear" not in type(output.grad_fn).__name__
    sum_loss(output).backward()
    assert source.take() is None
    source.arm(True)
    model.zero_grad()
    backward(model, torch.randn(4, 3))
    assert len(source.take()) == 4


def test_evaluation_passes_between_steps_leave_no_trace(model, source):
    x = torch.randn(4, 3)
    loss = sum_loss(model(x))
    with torch.no_grad():
        model(torch.randn(9, 3))
    model.eval()
    with torch.inference_mode():
        model(torch.randn(8, 3))
    model(torch.randn(7, 3))
    model.train()
    loss.backward()
    rows = source.take()
    source.detach()
    assert_close(rows, per_sample_loop(model, [x]))


def test_a_batch_without_samples_leaves_no_rows(model, source):
    F.cross_entropy(
        model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.long), reduction="sum"
    ).backward()
    assert source.take() is None
    backward(model, torch.randn(4, 3))
    assert len(source.take()) == 4
