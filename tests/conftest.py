import gc
import importlib.util
import signal
import subprocess
from functools import cache

import pytest

gc.disable()  # until all is imported: nothing of it is ever garbage
# A shell starts what runs in the background with Ctrl-C ignored, and tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Files with slow tests first: in the end all cores have quick ones to share."""
    slow = {
        item.path
        for item in items
        if item.get_closest_marker("slow") or item.get_closest_marker("paper")
    }
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """What was imported is not looked through again whenever garbage is sought.

    Nor is it sought as often: tests leave behind much that is no garbage yet. torch is
    imported here and not above: the process that only starts the others needs none.
    """
    import torch

    torch.set_num_threads(1)  # small matrices: a second thread costs more
    gc.freeze()
    gc.set_threshold(20_000, 20)
    gc.enable()


@pytest.fixture
def rng():
    import torch

    return torch.Generator().manual_seed(1234)


@pytest.fixture(scope="session")
def remembered_costs():
    """Opacus' Rényi costs, each computed once: a search for σ asks for thousands."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("opacus"):
            rdp = importlib.import_module("opacus.accountants.analysis.rdp")
            patch.setattr(rdp, "_compute_rdp", cache(rdp._compute_rdp))
        yield


@pytest.fixture(scope="module")
def few_orders(remembered_costs):
    """Rényi costs of few orders, where what they bound is not the subject.

    Those of orders that are not whole are series, which take a hundred times as long.
    """
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("opacus"):
            accountant = importlib.import_module("opacus.accountants").RDPAccountant
            patch.setattr(accountant, "DEFAULT_ALPHAS", [1.2, 1.5, *range(2, 64)])
        yield


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 kB; only root may make one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)
