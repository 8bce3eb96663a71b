"""Starts real workers over loopback, each a process of its own, and never hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 400  # seconds: far more than a launch takes, even on a busy machine


def environment():
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else torchrun keeps one store over all restarts, and a new worker may find the
        # address of a dead one in it (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def run_workers(script, *groups):
    """A script in groups of processes, one group after the other.

    Args:
        script: Its name.
        groups: P and further words of each; a worker has its rank in front of them.

    Returns:
        What each worker of a group printed, and their codes, for every group. The codes
        are None for one that did not end in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = json.dumps([[str(word) for word in words] for words in groups])
        words = (HERE / "forked.py", folder, HERE / script, said)
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # one of their own, to be ended together
            )
        try:
            process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        common = (folder / "output").read_text()
        return [
            _ended(folder / str(number), num_workers, common)
            for number, (num_workers, *_) in enumerate(groups)
        ]


def _ended(folder, num_workers, common):
    codes = folder / "codes.json"
    printed = [folder / f"output.{rank}" for rank in range(num_workers)]
    return (
        [common + (p.read_text() if p.exists() else "") for p in printed],
        json.loads(codes.read_text()) if codes.exists() else [None] * num_workers,
    )


def run_as_torchrun(*starts):
    """Programs as torchrun starts them: P, a folder to run in, the file and options.

    Returns:
        As ``run_workers``; what they print is in the folders, in said.0, ...
    """
    groups = [(num_workers, _free_port(), *rest) for num_workers, *rest in starts]
    return run_workers("as_torchrun.py", *groups)


def _free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def run_program(numbers, folder, module="checks"):
    """Every check of a module on P workers, for each P in this order.

    Returns:
        {P: {check: {rank: what it says}}}.
    """
    shared = folder / "shared"
    shared.mkdir()
    folders = {num: folder / str(num) for num in numbers}
    for each in folders.values():
        each.mkdir()
    groups = [(num, each, shared, module) for num, each in folders.items()]
    ended = run_workers("program.py", *groups)
    return {
        num: _answers(folders[num], outputs)
        for num, (outputs, _) in zip(numbers, ended, strict=True)
    }


def _answers(folder, outputs):
    results = {}
    for rank, output in enumerate(outputs):
        path = folder / f"results.{rank}.json"
        said = json.loads(path.read_text()) if path.exists() else {}
        for name, answer in said.items():
            results.setdefault(name, {})[rank] = answer
        results.setdefault("output", {})[rank] = output
    return results


def assert_passed(results, name, num_workers):
    answers = results.get(name, {})
    told = "\n".join(map(str, results["output"].values()))
    assert set(answers) == set(range(num_workers)), f"{answers}\n{told}"
    for rank, answer in answers.items():
        assert answer == "passed", f"rank {rank}: {answer}"


def run_alone(script, *arguments):
    """A script that starts its workers itself."""
    return subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
