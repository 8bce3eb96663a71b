import pytest
import torch

from dome.numerics.shard import alone
from dome.numerics.together import Ask, Small, Sum, together


class Calls:
    def __init__(self):
        self.totals, self.shapes = [], []

    def total(self, *sums):
        self.totals.append(len(sums))
        return sums

    def double(self, matrix, *options):
        self.shapes.append(tuple(matrix.shape))
        return (2 * matrix,)


def test_each_update_gets_its_own_answers():
    def update(number):
        (total,) = yield Sum(alone, (torch.tensor([number]),))
        (doubled,) = yield Small(lambda m: (2 * m,), (total.float(),))
        (answer,) = yield Ask((doubled.sum(),))
        return answer

    assert together(update(n) for n in (1.0, 5.0, 7.0)) == [2.0, 10.0, 14.0]


# A device that has shapes, and no numbers.
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sums_travel_as_one_and_matrices_of_one_shape_are_one_batch(device):
    calls = Calls()

    def update(size):
        matrix = torch.full((size, size), float(size), device=device)
        (matrix,) = yield Sum(calls.total, (matrix,))
        (matrix,) = yield Small(calls.double, (matrix,))
        return matrix

    results = together([update(2), update(3), update(2)])
    assert calls.totals == [3]
    # On a CPU each by itself: there a batch would round in another order.
    alone = [(2, 2), (2, 2), (3, 3)]
    assert sorted(calls.shapes) == ([(2, 2, 2), (3, 3)] if device == "meta" else alone)
    for size, matrix in zip((2, 3, 2), results, strict=True):
        assert matrix.shape == (size, size)
        if device == "cpu":
            assert torch.equal(matrix, torch.full((size, size), 2.0 * size))


def test_other_options_are_another_batch():
    calls = Calls()

    def update(option):
        matrix = torch.empty(2, 2, device="meta")
        (matrix,) = yield Small(calls.double, (matrix,), (option,))
        return matrix

    together([update(1), update(2), update(1)])
    assert sorted(calls.shapes) == [(2, 2), (2, 2, 2)]


def test_the_device_is_asked_when_nobody_can_go_on_without_it(monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda t: reads.append(len(t)) or tolist(t)
    )

    def quick():
        (answer,) = yield Ask((torch.tensor(1.0),))
        return answer

    def slow():
        (matrix,) = yield Small(lambda m: (m,), (torch.eye(3),))
        answers = yield Ask((matrix[0, 0], matrix[0, 1]))
        return answers

    assert together([quick(), slow()]) == [1.0, [1.0, 0.0]]
    assert reads == [3]


def test_an_update_without_questions_is_over_at_once():
    def update():
        yield from ()
        return "done"

    assert together([update()]) == ["done"]
    assert together([]) == []
