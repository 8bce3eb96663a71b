import pytest

from dome_lab.bench.timing import Pace, Variant, measure, ratios, seconds_of, spread


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, *seconds):
        durations = list(seconds)

        def step():
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]

        return step


def ignore(share):
    pass


def test_variants_take_turns_and_each_is_timed():
    clock, order = FakeClock(), []

    def logged(name, seconds):
        def step():
            order.append(name)
            clock.now += seconds

        return Variant(name, step, num_settle=0, num_warmup=1)

    variants = [logged("a", 1.0), logged("b", 3.0)]
    rounds = measure(variants, Pace(seconds=0, least=2), ignore, clock)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert rounds == [{"a": 1.0, "b": 3.0}] * 2


def test_steps_to_settle_are_not_timed_and_the_others_are_averaged():
    clock = FakeClock()
    step = clock.work(100.0, 10.0, 1.0, 2.0, 6.0)  # warm-up, settle, three timed
    variant = Variant("a", step, num_steps=3, num_settle=1, num_warmup=1)
    rounds = measure([variant], Pace(seconds=0, least=1), ignore, clock)
    assert rounds == [{"a": 3.0}]


def test_no_round_is_begun_after_the_time_is_over():
    clock = FakeClock()
    variant = Variant("a", clock.work(2.0), num_settle=0, num_warmup=0)
    assert len(measure([variant], Pace(seconds=7, least=1), ignore, clock)) == 4
    assert len(measure([variant], Pace(seconds=7, least=6), ignore, clock)) == 6
    few = Pace(seconds=7, least=1, most=2)
    assert len(measure([variant], few, ignore, clock)) == 2


def test_progress_grows_to_the_whole():
    clock, told = FakeClock(), []
    variant = Variant("a", clock.work(2.0), num_settle=0, num_warmup=0)
    measure([variant], Pace(seconds=7, least=1), told.append, clock)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_ratios_are_taken_within_a_round_so_that_common_noise_cancels():
    noise = [1.0, 5.0, 2.0]
    rounds = [{"plain": 2.0 * n, "ours": 3.0 * n} for n in noise]
    assert ratios(rounds, "ours", "plain") == [1.5, 1.5, 1.5]
    assert seconds_of(rounds, "plain") == [2.0, 10.0, 4.0]


def test_spread_is_median_and_quartiles():
    result = spread([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (result.low, result.median, result.high) == (2.0, 3.0, 4.0)
    single = spread([7.0])
    assert (single.low, single.median, single.high) == (7.0, 7.0, 7.0)
    assert str(result) == "3.00 (2.00-4.00)"


def test_a_failing_step_is_not_hidden():
    def step():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure([Variant("a", step)], Pace(seconds=0), ignore)
