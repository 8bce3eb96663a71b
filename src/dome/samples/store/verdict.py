"""Which remainders of a gradient are an error, and which are a penalty's.

Letters, for one parameter p of one backward pass: g its gradient, R (B, n) its rows,
r = g − Σ_b R_b what they leave, s = sign(p). A penalty on the weights in the loss is no
sample's: r = λ p for an L2 penalty, λ s for an L1 penalty, or a sum of both. Any other
remainder is a use of the parameter that was not captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

# Of fewer numbers, a remainder along p proves nothing: it always is.
FEWEST = 3
# The same for a remainder in the span of p and sign(p).
_FEWEST_FOR_BOTH = 9


@dataclass(frozen=True, slots=True)
class Finding:
    """The products of one parameter in one backward pass, on the host.

    Attributes:
        name: The parameter.
        num: n, how many numbers it has.
        has_rows: Whether any sample was captured.
        limits: What rounding explains: of its own size, and of all parameters'.
        rr: |r|², and so on.
        rw: With the parameter.
        rs: With its signs.
        ww: Of the parameter with itself.
        ws: With its signs.
        ss: Of the signs with themselves.
        gg: |g|².
        of_rows: |R|², 0 without any.
    """

    name: str
    num: int
    has_rows: bool
    limits: tuple[float, float]
    rr: float
    rw: float
    rs: float
    ww: float
    ws: float
    ss: float
    gg: float
    of_rows: float

    @property
    def size(self) -> float:
        """What r is measured by: sums of rows may cancel, and rounding does not."""
        return self.gg + self.of_rows

    def remainder(self, l2: float, l1: float) -> float:
        """|r − l2 p − l1 s|, what such a penalty leaves unexplained."""
        squared = self.rr - 2 * (l2 * self.rw + l1 * self.rs)
        squared += l2 * l2 * self.ww + 2 * l1 * l2 * self.ws + l1 * l1 * self.ss
        return sqrt(max(squared, 0.0))

    def penalties(self) -> list[tuple[float, float]]:
        """The coefficients of p and s that explain most: one, the other, both."""
        if self.num < FEWEST or self.ww == 0:
            return []
        fits = [(self.rw / self.ww, 0.0), (0.0, self.rs / self.ss)]
        determinant = self.ww * self.ss - self.ws**2
        # Weights of one size, as norms have at the start, leave nothing to tell apart.
        if self.num >= _FEWEST_FOR_BOTH and determinant > 1e-6 * self.ww * self.ss:
            l2 = (self.ss * self.rw - self.ws * self.rs) / determinant
            l1 = (self.ww * self.rs - self.ws * self.rw) / determinant
            fits.append((l2, l1))
        return fits


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """The parameters whose rows miss a part that is no penalty's."""
    total = sum(f.size for f in findings)
    if not isfinite(total):
        return []  # a loss that is not finite is another matter
    everything = sqrt(total)
    suspects = [f for f in findings if _limit(f, everything) < sqrt(f.rr)]
    # Small parameters believe in the penalty of larger ones.
    known = [
        fit
        for f in suspects
        for fit in f.penalties()
        if f.remainder(*fit) <= _limit(f, everything)
    ]
    return [
        f
        for f in suspects
        if all(
            f.remainder(*fit) > _limit(f, everything)
            for fit in ((0.0, 0.0), *f.penalties(), *known)
        )
    ]


def check_complete(findings: Sequence[Finding]) -> None:
    """Raise ``RuntimeError`` for a parameter whose rows miss a part of its gradient."""
    for finding in unexplained(findings):
        if not finding.has_rows:
            raise RuntimeError(
                f"parameter {finding.name!r} has a gradient that no captured sample "
                "accounts for: it was used outside model(...) or inside a "
                "torch.autograd.Function, or .grad was set by hand. Call the model "
                'itself, or use samples="microbatch"'
            )
        raise RuntimeError(
            f"the captured samples of parameter {finding.name!r} miss a part of its "
            f"gradient ({_share(finding):.0%} of it): it is used once more outside "
            "model(...) or inside a torch.autograd.Function. Call the model itself, "
            "put the step into `with grad_filter.watch(inputs):`, or use "
            'samples="microbatch"; if this is a penalty on the weights, pass '
            "ignore_penalty=True"
        )


def _share(finding: Finding) -> float:
    return sqrt(finding.rr / finding.gg) if finding.gg else 1.0


def _limit(finding: Finding, everything: float) -> float:
    own, of_all = finding.limits
    if not finding.has_rows:
        return own * sqrt(finding.size)
    return max(own * sqrt(finding.size), of_all * everything)
