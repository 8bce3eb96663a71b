import pytest
import torch

from dome.trackers import TRACKERS
from dome.trackers.linalg import Shard
from dome.trackers.tracker import update_all

DIMS, SAMPLES = (40, 700, 700), 8
every_tracker = pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())


class Messages:
    """One worker, which is told how many tensors each message has."""

    def __init__(self):
        self.sizes = []

    def total(self, *sums):
        self.sizes.append(len(sums))
        return sums


def several(make, total):
    return [
        make(d, 5, dtype=torch.float64, shard=Shard(d, (slice(0, d),), total))
        for d in DIMS
    ]


def batches(rng, num=6):
    return [
        [torch.randn(SAMPLES, d, generator=rng, dtype=torch.float64) for d in DIMS]
        for _ in range(num)
    ]


@every_tracker
def test_many_updates_at_once_have_the_bits_of_one_after_the_other(make, rng):
    at_once, alone = ([make(d, 5) for d in DIMS] for _ in range(2))
    for number, grads in enumerate(batches(rng)):
        if number == 3:
            grads[1] *= 1e-25  # that one is looked at again
        update_all(at_once, [G.float() for G in grads], 2.0)
        for tracker, G in zip(alone, grads, strict=True):
            tracker.update(G.float(), 2.0)
    for one, other in zip(at_once, alone, strict=True):
        assert one.num_updates == 6
        assert torch.equal(one.basis, other.basis)
        assert torch.equal(one.eigenvalues, other.eigenvalues)


@every_tracker
def test_sums_of_many_are_as_many_messages_as_those_of_one(make, rng):
    counts = []
    for num in (1, 3):
        messages = Messages()
        trackers = several(make, messages.total)[-num:]
        found = []
        for grads in batches(rng):
            messages.sizes.clear()
            update_all(trackers, grads[-num:])
            found.append((len(messages.sizes), sum(messages.sizes)))
        counts.append(min(found))  # where no basis had to be made orthonormal
    (one, tensors), (many, more) = counts
    assert one == many <= 2
    assert more == 3 * tensors


@every_tracker
def test_what_is_left_out_by_one_is_let_in_by_the_others(make, rng):
    trackers = [make(d, 5) for d in DIMS]
    first, second = ([G.float() for G in grads] for grads in batches(rng, 2))
    update_all(trackers, first)
    second[1][2, 3] = torch.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        update_all(trackers, second)
    assert [tracker.num_updates for tracker in trackers] == [2, 1, 2]
    assert [tracker.num_skipped for tracker in trackers] == [0, 1, 0]
