import multiprocessing
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from dome_lab.paper import workers


@contextmanager
def _forked():
    """Processes that compute runs are forked from one that has imported torch.

    Importing is most of what they do in tests. They are spawned, as for users, in half
    of test_workers.py and in commands that are processes themselves. Forked ones have
    the environment of the first test that forked.
    """
    context = multiprocessing.get_context("forkserver")
    # torch imports the last one with the first optimizer, and it is as much again.
    modules = ["dome_lab.paper.train", "matplotlib.figure", "torch._dynamo"]
    context.set_forkserver_preload(modules)
    names = vars(multiprocessing) | {"get_context": lambda kind: context}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "multiprocessing", SimpleNamespace(**names))
        yield


@pytest.fixture
def forked_workers():
    with _forked():
        yield


@pytest.fixture(scope="module")
def only_forked_workers():
    with _forked():
        yield
