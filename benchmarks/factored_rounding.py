"""What a factored basis loses to rounding, for several limits.

``dome.trackers.basis`` keeps U = S Q and multiplies it out before Q magnifies the
rounding of S by more than ``MOST_MAGNIFIED``. Here trackers in float32 with other
limits follow the same samples, those of a ResNet-8 that trains on random images, and
are held against one in float64: how often each multiplies out, the largest angle
between the subspaces, |UᵀU − I|. Zero means at every update, as if nothing were
factored.

    python benchmarks/factored_rounding.py
    python benchmarks/factored_rounding.py --batch-size 128 --forget 0.1
"""

import argparse
import math

import torch
from torch.nn.functional import cross_entropy

from dome import StreamingPower, per_sample_gradients
from dome.diagnostics.angles import principal_angles
from dome.trackers import basis as bases
from dome_lab.bench.training import Loop

RANK = 100
LIMITS = (0.0, 2.0, 4.0, 8.0, 32.0, math.inf)
NUM_UPDATES = 99
# From here on all start from the same directions: those that the first batches do not
# determine are arbitrary, and float32 rightly takes others than float64.
MEET_AT = 12


def meet(exact: StreamingPower, tracker: StreamingPower) -> None:
    """Give a tracker in float32 the state of one in float64."""
    state = {name: value.clone() for name, value in exact.state_dict().items()}
    state |= {"basis": exact.basis.float(), "Q": state["Q"][:0]}
    tracker.load_state_dict(state)


def main() -> None:
    """Print a line for each limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--forget", type=float)
    given = parser.parse_args()
    loop = Loop("resnet8", given.batch_size)
    exact = StreamingPower(loop.dim, RANK, forget=given.forget, dtype=torch.float64)
    trackers = {
        limit: StreamingPower(loop.dim, RANK, forget=given.forget) for limit in LIMITS
    }
    written = dict.fromkeys(LIMITS, 0)
    for i in range(NUM_UPDATES):
        x, y = next(loop.batches)
        G = per_sample_gradients(loop.model, cross_entropy, x, y)
        exact.update(G.double())
        for limit, tracker in trackers.items():
            bases.MOST_MAGNIFIED = limit
            tracker.update(G)
            written[limit] += len(tracker.state_dict()["Q"]) == 0
            if i == MEET_AT:
                meet(exact, tracker)
        loop.step()
    print("limit  multiplied out  largest angle  |UᵀU − I|")
    for limit, tracker in trackers.items():
        U = tracker.basis.double()
        error = (U.T @ U - torch.eye(RANK, dtype=U.dtype)).abs().max()
        angle = principal_angles(exact.basis, torch.linalg.qr(U)[0])[-1]
        times = f"{written[limit]} of {NUM_UPDATES}"
        print(f"{limit:5g}  {times:>14}  {angle:13.1e}  {error:9.1e}")


if __name__ == "__main__":
    main()
