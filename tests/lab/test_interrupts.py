import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

START = "import os, signal, sys, time; from dome_lab import interrupts\n"
INSTALL = "interrupts.install()\n"
PRESS = "signal.raise_signal(signal.SIGINT)\n"
CAUGHT = (
    "try:\n"
    "    with interrupts.working():\n"
    "        work()\n"
    "except KeyboardInterrupt:\n"
    "    print('caught')\n"
)
DROPPED = (
    "class Dropped:\n"
    "    def __del__(self):\n"
    "        signal.raise_signal(signal.SIGINT)\n"
    "def work():\n"
    "    Dropped()\n"
    "    time.sleep(3)\n"
    "    print('went on')\n"
)
COMMANDS = (
    ("demo", "--quick", "--epochs", "300"),
    ("bench", "startup", "--quick"),
    ("plan", "--model", "resnet18", "--rank", "100"),
    ("train", "--epochs", "300"),
    ("reproduce", "fig03", "--scale", "smoke"),
)
NUM_MOMENTS, LONGEST = 50, 4.0  # seconds: importing, starting processes, working


@pytest.fixture(autouse=True)
def _hears_ctrl_c():
    # The tests may have been started as a job that ignores it, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def python(code):
    return subprocess.run(
        [sys.executable, "-c", START + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_while_it_starts_the_process_ends_at_once():
    done = python(INSTALL + PRESS + "time.sleep(9); print('went on')")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "stopped; nothing was begun\n"


def test_an_interrupt_that_python_drops_in_a_callback_is_raised_again():
    done = python(INSTALL + DROPPED + CAUGHT)
    assert (done.stdout, done.stderr) == ("caught\n", "")
    # This is how it was lost: Python's own handler, and the work goes on.
    lost = python(DROPPED + CAUGHT)
    assert lost.stdout == "went on\n"
    assert "Exception ignored in" in lost.stderr


def test_an_interrupt_that_a_library_catches_is_raised_at_the_next_step():
    code = (
        "def work():\n"
        "    try:\n"
        f"        {PRESS}"
        "    except BaseException:\n"
        "        pass\n"
        "    interrupts.check()\n"
        "    print('went on')\n"
    )
    assert python(INSTALL + code + CAUGHT).stdout == "caught\n"


def test_what_a_dropped_interrupt_breaks_later_is_told_as_a_stop():
    code = (
        "import typer\n"
        "from dome_lab.cli.screen import one_line_errors\n"
        "def work():\n"
        "    context = type('Context', (), {'obj': False})\n"
        "    with one_line_errors(context, 'all is kept'):\n"
        "        try:\n"
        f"            {PRESS}"
        "        except BaseException:\n"
        "            raise RecursionError('half of a module') from None\n"
        "try:\n"
        "    with interrupts.working(): work()\n"
        "except typer.Exit as end: sys.exit(end.exit_code)\n"
    )
    done = python(INSTALL + code)
    assert (done.returncode, done.stderr) == (130, "stopped; all is kept\n")


def test_what_has_been_dealt_with_is_not_raised_again():
    code = (
        "def work():\n"
        f"    try: {PRESS}"
        "    except KeyboardInterrupt: interrupts.arrived()\n"
        "    interrupts.check(); time.sleep(0.2); print('went on')\n"
    )
    assert python(INSTALL + code + CAUGHT).stdout == "went on\n"


def test_the_third_press_ends_a_process_that_hears_none():
    code = (
        "def work():\n"
        "    for press in range(3):\n"
        f"        try: {PRESS}"
        "        except KeyboardInterrupt: print(press, flush=True)\n"
    )
    done = python(INSTALL + code + CAUGHT)
    assert (done.returncode, done.stdout) == (130, "0\n1\n")
    assert done.stderr == "stopped\n"


def test_a_job_that_was_started_to_ignore_ctrl_c_ignores_it():
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    assert python(code + INSTALL + PRESS + "print('went on')").stdout == "went on\n"


def interrupted(moment, folder):
    """What came of a command to which Ctrl-C was sent after so many seconds."""
    place, seconds = moment
    words = COMMANDS[place % len(COMMANDS)]
    out = ["--out", str(folder / f"{place}" / "rows")] if words[0] != "plan" else []
    process = subprocess.Popen(
        [sys.executable, "-m", "dome_lab", *words, *out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(seconds)
    # All is done when it ignores Ctrl-C: Python takes itself apart.
    if process.poll() is not None or has_signal(process.pid, "SigIgn"):
        return "over", words, process.communicate()[1]
    was_handled = has_signal(process.pid, "SigCgt")
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, complaint = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "lost", words, process.communicate()[1]
    if process.returncode == 130 and complaint.startswith("stopped"):
        return ("stopped" if complaint.count("\n") == 1 else "wordy"), words, complaint
    # Python itself was starting, or was still importing what takes Ctrl-C over.
    if "KeyboardInterrupt" in complaint and "dome_lab/cli" not in complaint:
        return "before the first line", words, complaint
    # On a busy machine even Python's own handler may not have been there yet.
    if process.returncode == -signal.SIGINT and not was_handled:
        return "before the first line", words, complaint
    return process.returncode, words, complaint


def has_signal(pid, kind):
    """Whether a process handles Ctrl-C, or ignores it, by the system's word."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():  # not Linux: it is held to having a handler
        return kind == "SigCgt"
    lines = status.read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith(kind))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_when_all_is_done_ctrl_c_stops_nothing():
    code = "interrupts.over()\n" + PRESS + "print('went on')"
    assert python(INSTALL + code).stdout == "went on\n"
    code = "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    assert python(INSTALL + code).stdout == ""  # another's handler is left alone


@pytest.mark.slow
def test_ctrl_c_at_any_moment_stops_it_in_one_line(tmp_path):
    chosen = random.Random(7)
    # One moment in each of as many parts of the time; squared: most are in the first
    # two seconds, where it starts. The parts of a command are far apart.
    shares = [
        (n * 7 % NUM_MOMENTS + chosen.random()) / NUM_MOMENTS
        for n in range(NUM_MOMENTS)
    ]
    moments = [(n, 0.1 + LONGEST * share**2) for n, share in enumerate(shares)]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda moment: interrupted(moment, tmp_path), moments))
    good = {"stopped", "before the first line", "over"}
    bad = [end for end in ends if end[0] not in good]
    assert not bad, "\n\n".join(f"{what} {words}\n{said}" for what, words, said in bad)
    assert sum(end[0] == "stopped" for end in ends) >= 0.6 * NUM_MOMENTS


@pytest.mark.slow
def test_an_interrupt_while_torch_imports_numpy_is_lost_by_torch_and_not_by_us():
    # torch/csrc imports numpy while torch._C is made, and clears whatever is raised.
    press = (
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            sys.meta_path.remove(self)\n"
        f"            {PRESS}"
        "sys.meta_path.insert(0, Press())\n"
    )
    lost = python(press + "import torch; print('went on')")
    assert lost.stdout == "went on\n"  # if not, torch has learned: this test may go
    done = python(INSTALL + press + "import torch; print('went on')")
    assert (done.returncode, done.stdout) == (130, "")
