import pytest

import dome
from dome.planning.workers import Machine

BILLION = 10**9


def by_name(plan):
    return {choice.name: choice for choice in plan.choices}


def test_local_gradients_as_samples_cost_what_ddp_costs():
    plan = dome.plan_workers(BILLION, 100, 32, 64)
    choice = by_name(plan)['samples="worker"']
    assert plan.ddp_bytes == pytest.approx(2 * 63 / 64 * 4 * BILLION)
    assert 1 < choice.share_of_ddp < 1.001


@pytest.mark.parametrize("batch_size", [32, 1000])
def test_single_samples_cost_one_gradient_each_and_the_filtered_one(batch_size):
    plan = dome.plan_workers(10**9, 100, batch_size, 8)
    choice = by_name(plan)['samples="per_sample"']
    assert choice.share_of_ddp == pytest.approx((batch_size + 1) / 2, rel=0.01)


def test_a_compressor_divides_the_bytes_and_needs_the_whole_basis_everywhere():
    plan = dome.plan_workers(10**8, 50, 4, 16, rate=500)
    own, split = by_name(plan)["HadamardSketch(500)"], plan.choices[0]
    assert own.share_of_ddp == pytest.approx(1 / 500)
    assert own.memory > 4 * 10**8 * 50
    assert split.memory == pytest.approx(4 * 10**8 * (50 / 16 + 5))


def test_a_split_model_leaves_room_and_sends_a_reduce_scatter():
    plan = dome.plan_workers(BILLION, 100, 32, 64)
    choice = by_name(plan)['fully_shard: samples="worker"']
    assert choice.bytes_sent == pytest.approx(63 / 64 * 4 * BILLION, rel=0.001)
    assert choice.memory == pytest.approx(4 * BILLION * (100 / 64 + 1 + 2 / 64))
    assert choice.largest_rank > by_name(plan)['samples="worker"'].largest_rank


def test_the_largest_rank_fits_and_the_next_one_does_not():
    machine = Machine(memory=40e9)
    plan = dome.plan_workers(10**9, 1, 8, 16, machine=machine)
    for choice in plan.choices:
        if choice.largest_rank:
            at = dome.plan_workers(10**9, choice.largest_rank, 8, 16, machine=machine)
            beyond = dome.plan_workers(
                10**9, choice.largest_rank + 1, 8, 16, machine=machine
            )
            assert by_name(at)[choice.name].fits
            assert not by_name(beyond)[choice.name].fits


def test_the_suggestion_says_what_to_attach_or_why_not():
    assert dome.plan_workers(10**8, 10, 4, 8).suggestion == (
        'attach(model, optimizer, rank=10, samples="worker")'
    )
    assert "does not fit: split the model" in str(dome.plan_workers(10**11, 10, 4, 8))
    assert dome.plan_workers(10**10, 1, 4, 8).suggestion == (
        'fully_shard(model), then attach(model, optimizer, rank=1, samples="worker")'
    )
    small = Machine(memory=17e9)
    crowded = dome.plan_workers(10**9, 1000, 4, 8, machine=small)
    assert "nothing fits" in crowded.suggestion


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11, 1, 2), "rank must be between 1 and 10, got 11"),
        ((10, 1, 0, 2), "batch_size must be at least 1, got 0"),
        ((10, 1, 1, 0), "num_workers must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dome.plan_workers(*arguments)
