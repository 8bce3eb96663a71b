import json
import pickle
from dataclasses import asdict, replace

import pytest

from dome.parameters import LAYOUTS
from dome.trackers import TRACKERS
from dome_lab.paper import run as module
from dome_lab.paper.run import Run, check_name

RUN = Run(task="digits", model="resnet8", seed=0, batch_size=8, epochs=1)


def test_knows_the_choices_of_the_library():
    assert set(module.LAYOUTS) == set(LAYOUTS)
    assert set(module.TRACKERS) == set(TRACKERS)


@pytest.mark.parametrize(
    ("changes", "arm"),
    [
        ({}, "plain"),
        ({"rate": 9.0}, "plain"),
        ({"rank": 2, "removes": "nothing"}, "plain"),
        ({"rank": 2}, "filtered"),
        ({"rank": 2, "removes": "rest"}, "filtered"),
        ({"rank": 2, "removes": "uncoded"}, "filtered"),
        ({"rank": 2, "removes": "hessian"}, "filtered"),
    ],
)
def test_watching_counts_as_plain(changes, arm):
    assert replace(RUN, **changes).arm == arm


def test_survives_json_and_pickle_and_is_hashable():
    run = replace(RUN, rank=3, rate=100, lr=0.1)
    assert Run(**json.loads(json.dumps(asdict(run)))) == run
    assert pickle.loads(pickle.dumps(run)) == run
    assert len({run, replace(run, rate=100.0)}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adm"}, "no optimizer 'adm', did you mean 'adam'"),
        ({"removes": "all"}, "no removes 'all'.* nothing, span, rest, uncoded"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rate": 0.5}, "rate must be at least 1, got 0.5"),
        ({"rate": float("nan")}, "rate must be at least 1, got nan"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
        ({"lr": float("inf")}, "lr must be a positive number, got inf"),
        ({"forget": 1.0}, "forget must lie between 0 and 1, got 1.0"),
        ({"momentum": 0.9, "optimizer": "adam"}, "momentum is sgd's"),
        ({"momentum": 1.0}, "momentum is sgd's or ema's and lies in"),
        ({"num_train": 7}, "batch_size 8 is more than the 7 training samples"),
        ({"removes": "rest"}, "removes='rest' needs a rank"),
        ({"removes": "hessian"}, "removes='hessian' needs a rank"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_values_no_run_can_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **changes)


def test_a_name_like_no_other_gets_the_list_alone():
    with pytest.raises(ValueError, match=r"^no task 'zzz'\. There are: digits, mnist$"):
        check_name("task", "zzz", ["digits", "mnist"])
