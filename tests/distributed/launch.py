"""Starts real workers over loopback, each a process of its own, and never hangs."""

import json
import os
import signal
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


def run_workers(script, num_workers, *arguments):
    """A script in P processes, with rank and P in front: what each printed, and codes.

    The codes are None for one that did not end in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = (HERE / "forked.py", folder, HERE / script, num_workers, *arguments)
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
        codes, common = folder / "codes.json", (folder / "output").read_text()
        printed = [folder / f"output.{rank}" for rank in range(num_workers)]
        return (
            [common + (p.read_text() if p.exists() else "") for p in printed],
            json.loads(codes.read_text()) if codes.exists() else [None] * num_workers,
        )


def run_program(num_workers, folder, shared, module="checks"):
    """Every check of a module on P workers: {check: [what each rank says]}."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs, _ = run_workers("program.py", num_workers, folder, shared, module)
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


def torchrun(script, *arguments, workers, restarts=0, timeout=LIMIT, cwd=None):
    """A script under torchrun, on a free port."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={workers}", f"--max-restarts={restarts}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *(str(script), *map(str, arguments)),
    ]
    return subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
    )
