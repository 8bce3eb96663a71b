"""Memory of this process, and functions in processes of their own."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
# glibc gives freed memory back at once, so that a peak is what was needed and not what
# happened to be kept; numbers then repeat to a tenth of a MiB.
TIDY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
FORGET_PEAK = "5"  # see proc(5)


def peak_memory(device: str = "cpu") -> int:
    """The most bytes this process had in memory since it started or was reset.

    On a GPU those of tensors, without what torch's allocator keeps for later.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def reset_peak(device: str = "cpu") -> bool:
    """Let the peak start again from what is in memory now. False where impossible."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text(FORGET_PEAK)
    except OSError:
        return False
    return True


def in_fresh_process(
    home: str,
    name: str,
    environment: Mapping[str, str],
    **arguments: object,
) -> Any:  # noqa: ANN401 (whatever the function returns)
    """What a function returns in a Python process of its own, through JSON.

    Args:
        home: Module of the function.
        name: The function.
        environment: Variables to add to those of this process.
        **arguments: Its arguments, anything JSON can hold.
    """
    request = json.dumps([home, name, arguments])
    code = f"from {__name__} import answer; answer()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=request,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(
            f"{name}({_shown(arguments)}) failed in its process with code "
            f"{done.returncode}: {reason}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def answer() -> None:
    """Body of the process: reads the request, writes the result."""
    home, name, arguments = json.load(sys.stdin)
    result = getattr(import_module(home), name)(**arguments)
    sys.stdout.write(json.dumps(result) + "\n")
    gc.freeze()  # the process ends: nothing is searched for garbage


def _status(field: str) -> int:
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows, which has no /proc either

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _shown(arguments: dict[str, object]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in arguments.items())
