# One sample more, in the worst place, told from all that a step releases.
#
# A step that is booked with noise multiplier σ (without subsampling) is claimed to be
# μ-GDP with μ = 1/σ: whatever test is made of what it releases, its hits p and false
# alarms q obey Φ⁻¹(p) − Φ⁻¹(q) ≤ μ (Dong, Roth and Su 2022). A bound on the left side
# from below that exceeds μ refutes the claim, whatever the distribution of releases is
# (Nasr et al. 2023). The gradient of a sample is the sample itself; the adversary
# knows all other samples, the parameters and the basis.

import math
from functools import cache

import torch
from privacy.setting import linear, mean_output, train
from scipy.stats import beta, binom, norm
from torch.utils.data import TensorDataset

import dome.privacy

DIM, RANK, CLIP = 12, 2, 1.0
SIGMA, SHARE = 0.4, 0.9
MU = 1 / SIGMA
RUNS = 600
CONFIDENCE = 0.99
BOOKED, FREE, NOTHING = "as booked", "as if the basis were free", "nothing along it"
# Of the scores below, fixed beforehand.
THRESHOLDS = {BOOKED: MU / 2, FREE: MU * math.sqrt(1 + SHARE) / 2, NOTHING: -1e-2}
ALPHA = (1 - CONFIDENCE) / (2 * len(THRESHOLDS))  # all rates hold together


def others():
    rng = torch.Generator().manual_seed(0)
    return 0.1 * torch.randn(6, DIM, generator=rng, dtype=torch.float64)


def canary(U):
    """Nearly all of it in span(U), where a second moment moves most; large outside."""
    outside = torch.ones(DIM, dtype=torch.float64)
    outside -= U @ (U.T @ outside)
    return 1e4 * U[:, 0] + 1e2 * outside / outside.norm()


class Adversary:
    """Knows what a step releases of every sample, literally, and the booked noise."""

    def __init__(self, basis, U, filters):
        self.U, self.filters = U, filters
        share = SHARE if basis == "private" else 0.0
        self.stds = [SIGMA * CLIP / math.sqrt(1 - share)]
        if share:
            self.stds.append(math.sqrt(2) * SIGMA / math.sqrt(share))
        self.known = [sum(parts) for parts in zip(*map(self.parts, others()))]  # noqa: B905
        x = canary(U)
        self.signal, self.direction = self.parts(x), x / x.norm()
        self.sizes = [float(signal.norm()) for signal in self.signal]

    def parts(self, g):
        """What a sample adds to the sum (D,) and to the second moment (D, K + 1)."""

        def clipped(g):
            return g * min(1.0, CLIP / float(g.norm()))

        h = g - self.U @ (self.U.T @ g) if self.filters else g
        row, one = clipped(g) / CLIP, torch.ones(1, dtype=torch.float64)
        return clipped(h), torch.outer(row, torch.cat([row @ self.U, one]))

    def scores(self, release, gradient):
        """How much of the canary is seen, in units of the noise that is booked."""
        z, mu = [], []
        for std, seen, known, signal, size in zip(
            self.stds, (release.gradient, release.moment), self.known, self.signal,
            self.sizes, strict=False,
        ):  # fmt: skip
            z.append(float(((seen - known) * signal).sum()) / (size * std))
            mu.append(size / std)
        # The gradient with the noise of a step that spends nothing on a basis.
        free = [self.stds[0] / (SIGMA * CLIP), 1.0]
        along = float(gradient @ self.direction) / self.stds[0]
        return {
            BOOKED: _combined(z, mu),
            FREE: _combined(_times(free, z), _times(free, mu)),
            NOTHING: -abs(along),
        }


def _times(a, b):
    return [x * y for x, y in zip(a, b, strict=False)]


def _combined(z, mu):
    return sum(_times(z, mu)) / math.hypot(*mu)


def attached(basis, seed, learned):
    model = linear(DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {}
    if basis == "public":
        rng = torch.Generator().manual_seed(7)
        public = torch.randn(5, DIM, generator=rng, dtype=torch.float64)
        options = {"public": [(public, None)], "loss_fn": mean_output}
        options["update_every"] = 10**9
    private = dome.privacy.attach(
        model,
        optimizer,
        RANK,
        CLIP,
        SIGMA,
        sample_rate=1.0,
        basis=basis,
        basis_share=SHARE,
        expected_batch_size=1.0,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    if basis == "public":
        private._basis.prepare()
    if learned:  # a private basis that filters
        private._basis._num_updates = 1
    return model, optimizer, private


def released(basis, with_canary, *, tamper, seed=0, whole=False, learned=False):
    """Scores of many steps, all taken from one and the same state.

    ``whole`` trains a model; otherwise the step is given the samples' gradients.
    """
    model, optimizer, private = attached(basis, 2 * seed + with_canary, learned)
    source, seen = private._basis, []
    source.learn = seen.append  # and nothing is learned
    U = source.directions()
    filters = U is not None and source.filters_first
    if U is None:
        U = source.moment_basis if basis == "private" else torch.eye(DIM, RANK).double()
    adversary = Adversary(basis, U, filters)
    rows = others()
    if with_canary:
        rows = torch.cat([rows, canary(U)[None]])
    data = TensorDataset(rows, torch.zeros(len(rows)))
    if not whole:
        private._samples.take = rows.clone
        private.loader(data)
    tamper(private)
    found = []
    for _ in range(RUNS):
        if whole:
            train(model, optimizer, private, data, loss_fn=mean_output)
        else:
            private.step()
        found.append(adversary.scores(seen.pop(), model.weight.grad[0]))
    return found


def audit(basis, tamper=lambda private: None, **options):
    """A μ that is exceeded with the confidence above; the claim is ``MU``."""
    inside, outside = (
        released(basis, present, tamper=tamper, **options) for present in (True, False)
    )
    return max(
        bound(*(sum(s[name] > threshold for s in world) for world in (inside, outside)))
        for name, threshold in THRESHOLDS.items()
    )


@cache
def bound(hits, alarms):
    """Φ⁻¹(p) − Φ⁻¹(q) from below, by Clopper and Pearson's intervals."""
    least = beta.ppf(ALPHA, hits, RUNS - hits + 1) if hits else 0.0
    most = beta.ppf(1 - ALPHA, alarms + 1, RUNS - alarms) if alarms < RUNS else 1.0
    return norm.ppf(least) - norm.ppf(most)


def power(p, q):
    """Probability that a test with these rates refutes the claim."""
    counts = range(RUNS + 1)
    hits, alarms = (binom.pmf(counts, RUNS, rate) for rate in (p, q))
    total, few = 0.0, 0
    for h in counts:
        # More hits allow for more alarms.
        while few <= RUNS and bound(h, few) > MU:
            few += 1
        total += hits[h] * alarms[:few].sum()
    return float(total)
