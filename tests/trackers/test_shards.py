import threading

import pytest
import torch
from streams import decaying_stream

from dome.trackers import TRACKERS
from dome.trackers.linalg import Shard


class Table:
    """Adds up what workers, here threads, put on it."""

    def __init__(self, num_workers):
        self.parts = [None] * num_workers
        self.barrier = threading.Barrier(num_workers, timeout=60)

    def total(self, worker):
        def add(*sums):
            self.parts[worker] = sums
            self.barrier.wait()
            whole = tuple(sum(column) for column in zip(*self.parts, strict=True))
            self.barrier.wait()
            return whole

        return add


def ranges_of(worker, num_workers, dim, num_parts):
    """A worker's chunk of each of a few parts, as ``fully_shard`` cuts parameters."""
    ranges = []
    for part in torch.arange(dim).chunk(num_parts):
        first, stop = int(part[0]), int(part[-1]) + 1
        size = -(-len(part) // num_workers)
        ends = (min(stop, first + i * size) for i in (worker, worker + 1))
        ranges.append(slice(*ends))
    return tuple(ranges)


def run_shards(num_workers, dim, work, num_parts=1):
    """work(shard) on every worker; the results, and errors raised here."""
    table, results = Table(num_workers), [None] * num_workers

    def run(worker):
        ranges = ranges_of(worker, num_workers, dim, num_parts)
        try:
            results[worker] = work(Shard(dim, ranges, table.total(worker)))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            results[worker] = error
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results


every_tracker = pytest.mark.parametrize("make", TRACKERS.values(), ids=TRACKERS.keys())


@every_tracker
@pytest.mark.parametrize(
    ("num_workers", "dim", "rank", "num_samples", "oversample"),
    [
        # One range of rows each: samples fewer than directions, and more.
        *[(2, 120, 40, 4, 3), (2, 120, 6, 30, 0), (2, 2, 1, 5, 0)],
        # Three ranges each, a worker without rows, and bases long enough to be kept as
        # products, of few and of many samples.
        *[(3, 120, 10, 4, 0), (3, 401, 10, 4, 0), (3, 401, 6, 30, 2), (3, 2, 1, 5, 0)],
    ],
)
def test_shards_together_are_the_whole_tracker(
    make, num_workers, dim, rank, num_samples, oversample, rng
):
    options = {"oversample": oversample, "dtype": torch.float64}
    batches = list(decaying_stream(rng, dim, num_samples, 50))
    batches[7] += 50  # a long mean
    batches[9][:] = batches[9][0].clone()  # no variance
    batches[11][1:] = batches[11][-1].clone()  # a deficient batch
    g = torch.randn(dim, generator=rng, dtype=torch.float64)

    def work(shard):
        tracker = make(dim, rank, shard=shard, **options)
        for G in batches:
            tracker.update(shard.held_of(G.T).T, scale=0.5)
        return tracker, tracker.project_out(shard.held_of(g))

    whole, projected = work(Shard.whole(dim))
    num_parts = 1 if num_workers == 2 else 3  # one range of rows, or several
    done = run_shards(num_workers, dim, work, num_parts)
    shards, parts = zip(*done, strict=True)
    place = [
        ranges_of(worker, num_workers, dim, num_parts) for worker in range(len(shards))
    ]
    order = torch.cat([torch.arange(dim)[part] for ranges in place for part in ranges])
    back = order.argsort()
    basis = torch.cat([tracker.basis for tracker in shards])[back]
    tight = {"rtol": 1e-9, "atol": 1e-9}
    # The signs of eigenvectors are free.
    torch.testing.assert_close(basis @ basis.T, whole.basis @ whole.basis.T, **tight)
    torch.testing.assert_close(torch.cat(parts)[back], projected, **tight)
    for tracker in shards:
        torch.testing.assert_close(tracker.eigenvalues, whole.eigenvalues, **tight)
        assert tracker.effective_rank == pytest.approx(whole.effective_rank)
        seen = tracker.last_update
        torch.testing.assert_close(seen.captured, whole.last_update.captured, **tight)
        torch.testing.assert_close(seen.total, whole.last_update.total, **tight)


@every_tracker
@pytest.mark.filterwarnings("ignore:dome left a batch out")
def test_one_value_that_is_not_finite_is_left_out_by_every_shard(make, rng):
    good = torch.randn(5, 30, generator=rng)
    bad = good.clone()
    bad[1, 29] = float("nan")  # the last shard's

    def work(shard):
        tracker = make(30, 4, shard=shard)
        for G in (good, bad, good):
            tracker.update(shard.held_of(G.T).T)
        return tracker.num_skipped

    assert run_shards(3, 30, work) == [1, 1, 1]


def test_bfloat16_shards_start_from_the_columns_of_the_whole():
    def work(shard):
        return TRACKERS["power"](5000, 3, dtype=torch.bfloat16, shard=shard).basis

    whole = work(Shard.whole(5000))
    basis = torch.cat(run_shards(2, 5000, work))
    # Sums in another order, then rounded to eight bits.
    torch.testing.assert_close(basis, whole, rtol=1e-2, atol=1e-4)


@every_tracker
def test_a_shard_of_another_dimension_is_refused(make):
    with pytest.raises(ValueError, match="one of 9 rows, dim is 8"):
        make(8, 2, shard=Shard.whole(9))
