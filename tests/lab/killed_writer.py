# Run as a program: it imports no torch, so that a fork is a process to kill. Prints how
# many kills there were, and how many of them hit a folder that had rows.
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from dome_lab.paper import rows as stored
from dome_lab.paper.lock import locked
from dome_lab.paper.rows import append_run, mend, read_runs, record_session, write_text
from dome_lab.paper.run import Run

NUM_RUNS, NUM_ROWS = 4, 3
CALLS = ("write", "fsync", "ftruncate", "truncate", "replace", "unlink")


def a_run(seed):
    return Run(task="digits", model="resnet8", seed=seed, batch_size=8, epochs=NUM_ROWS)


def rows_of(run):
    numbers = range(1, NUM_ROWS + 1)
    return [run.columns() | {"epoch": e, "loss": 0.1 * e + run.seed} for e in numbers]


def work(folder, tell):
    """What a command does to its folder: mend, compute what is missing, conclude."""
    with locked(folder):
        path = folder / "rows.jsonl"
        mend(path)
        found = read_runs([path])
        record_session(path, {"figure": "fig90"}, "cpu")
        for seed in range(NUM_RUNS):
            if ("train", a_run(seed)) not in found:
                append_run(path, rows_of(a_run(seed)))
                os.pwrite(tell, bytes([seed + 1]), 0)  # told: it is on disk
        record_session(path, {"figure": "fig90", "seconds": 1.0})
        write_text(folder / "claims.json", json.dumps({"holds": 3}) + "\n")


def kill_at(point):
    """Let this process end at a moment around one of its system calls that write."""
    left = [point]

    def is_now():
        left[0] -= 1
        return left[0] < 0

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(name, really):
        def call(*arguments, **options):
            if is_now():
                end()
            if name == "write" and is_now():
                handle, content = arguments
                really(handle, bytes(content)[: len(content) // 2])
                end()
            result = really(*arguments, **options)
            if is_now():
                end()
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def killed(folder, point, tell):
    """Whether a process that worked there was killed; False: it came to its end."""
    child = os.fork()
    if child == 0:
        kill_at(point)
        work(folder, tell)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed"
    return os.WIFSIGNALED(status)


def check(folder, tell):
    """Nothing that was told to be stored is lost, and what is there can be read."""
    num_told = max(os.pread(tell, 1, 0), default=0)
    found = read_runs([folder / "rows.jsonl"])
    assert [run.seed for _, run in found] == list(range(len(found)))
    assert len(found) >= num_told, (len(found), num_told)
    for name in ("rows.meta.json", "claims.json"):
        if (folder / name).exists():
            json.loads((folder / name).read_text())
    return len(found)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main(root):
    stored.provenance = lambda device: {"device": device}  # git would be asked
    undisturbed = root / "undisturbed"
    undisturbed.mkdir()
    with (root / "told").open("w+b") as file:
        tell = file.fileno()
        work(undisturbed, tell)
        expected, num_kills, num_with_rows, point = contents(undisturbed), 0, 0, 0
        chain = root / "chain"  # killed again and again, each time a little later
        chain.mkdir()
        while True:
            os.ftruncate(tell, 0)
            folder = root / "once"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if not killed(folder, point, tell):
                break
            num_kills += 1
            num_with_rows += check(folder, tell) > 0
            work(folder, tell)
            assert contents(folder) == expected, f"after a kill at {point}"
            point += 1
        os.ftruncate(tell, 0)
        for step in range(point):
            was_killed = killed(chain, step, tell)
            num_kills += was_killed
            num_with_rows += bool(check(chain, tell)) and was_killed
        work(chain, tell)
        assert contents(chain) == expected
    counted = {"kills": num_kills, "with_rows": num_with_rows}
    sys.stdout.write(json.dumps(counted) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
