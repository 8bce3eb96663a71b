"""Test accuracy of private training on MNIST by epsilon, for each source of the basis.

Not in the paper, which names differential privacy as a use. Claims: with a basis that
keeps privacy, accuracy is above that of DP-SGD at the same epsilon. Samples are
filtered, then clipped; the private basis is paid for within epsilon. Who has public
samples can also begin on them: that, with a public basis and without, are two more
arms.

Scale cpu: 4,500 private and 500 public training images, 2,000 test images, L = 256
expected samples a step, 5 epochs (85 steps), δ = 1e-5, 3 seeds. About ten
core-minutes in all.

Learning rate 4 with clipping norm 0.1, at which nearly every sample is clipped in every
arm, and rank 10 were set beforehand and not tuned. One trial with seed 0 on twice the
images (4 epochs, ε = 3) had been seen: 0.83 for DP-SGD, 0.89 public, 0.83 released.
``tab04`` is DP-SGD with the literature's settings, on all of MNIST.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from dome_lab.paper import drawing
from dome_lab.paper.claims import Claim, always, claim, paired
from dome_lab.paper.drawing import draw_points, end_values
from dome_lab.paper.private import compute_private
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.statistics import distinct, ends, number, select

PRETRAIN = 60  # epochs on the public images


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of private training, and how it is drawn.

    Attributes:
        name: As it is read.
        basis: Where its directions are from; None does not filter.
        pretrained: Whether it begins on the public images.
        colour: Of its line,
        dash: the line's,
        marker: and of its points.
    """

    name: str
    basis: str | None
    pretrained: bool
    colour: str
    dash: str
    marker: str

    def of(self, run: Run) -> Run:
        """The run in this way."""
        return replace(
            run,
            basis=self.basis,
            rank=None if self.basis is None else run.rank,
            pretrain=run.pretrain if self.pretrained else 0,
        )

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Those of its rows that are among these."""
        mine = select(rows, basis=self.basis)
        return [row for row in mine if bool(row["pretrain"]) == self.pretrained]


PLAIN = Arm("DP-SGD", None, False, "#D55E00", "--", "s")
FILTERED = (
    Arm("public basis", "public", False, "#0072B2", "-", "o"),
    Arm("released basis", "released", False, "#009E73", ":", "^"),
    Arm("private basis", "private", False, "#CC79A7", "-.", "D"),
)
PRETRAINED = Arm("pre-trained on public", None, True, "#E69F00", "--", "v")
BOTH = Arm("pre-trained, public basis", "public", True, "#56B4E9", "-", "P")
ARMS = (PLAIN, *FILTERED, PRETRAINED, BOTH)
PAPER = Run(
    task="mnist",
    model="tanh_cnn",
    seed=0,
    batch_size=512,
    epochs=20,
    lr=4.0,
    rank=10,
    max_grad_norm=0.1,
    pretrain=PRETRAIN,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: a run, the arms, the epsilons, and how many seeds."""

    run: Run = PAPER
    arms: tuple[Arm, ...] = ARMS
    epsilons: tuple[float, ...] = (0.5, 1, 2, 4, 8)
    num_seeds: int = 5


SCALES = {
    "paper": Config(),
    "cpu": Config(
        run=replace(PAPER, num_train=5000, num_test=2000, epochs=5, batch_size=256),
        epsilons=(1, 3, 8),
        num_seeds=3,
    ),
    "smoke": Config(
        run=replace(
            PAPER,
            task="digits",
            num_train=60,
            num_test=50,
            rank=2,
            epochs=1,
            batch_size=30,
            pretrain=2,
        ),
        epsilons=(3, 8),
        num_seeds=2,
    ),
}
compute_run = compute_private


def runs(config: Config) -> list[Run]:
    """Every arm at every epsilon and seed."""
    return [
        replace(arm.of(config.run), epsilon=epsilon, seed=seed)
        for arm in config.arms
        for epsilon in config.epsilons
        for seed in range(config.num_seeds)
    ]


def parts(config: Config) -> list[Config]:
    """Without pre-training, and pre-training against DP-SGD."""
    return [
        replace(config, arms=(PLAIN, *FILTERED)),
        replace(config, arms=(PLAIN, PRETRAINED, BOTH)),
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Accuracy at the end by epsilon, a line an arm."""
    figure, ((axes,),) = drawing.canvas(1, 1, drawing.COLUMN, 3.6)
    epsilons = distinct(rows, "epsilon")
    for shift, arm in enumerate(_arms_of(rows)):
        # Beside each other, so that intervals can be told apart.
        x = [epsilon * 1.03 ** (shift - 2.5) for epsilon in epsilons]
        mine = arm.rows(rows)
        draw_points(
            axes,
            x,
            [end_values(select(mine, epsilon=epsilon)) for epsilon in epsilons],
            arm.colour,
            label=arm.name,
            linestyle=arm.dash,
            marker=arm.marker,
        )
    drawing.log_below(axes, epsilons, {})
    drawing.label(axes, f"ε at δ = {number(rows[0], 'delta'):g}", "test accuracy")
    drawing.add_title(figure, rows, axes)
    private = int(number(rows[0], "num_private"))
    drawing.add_note(
        figure,
        drawing.statistics_note(rows, "bars"),
        f"{private:,} training images are private, the rest public.",
        _public_alone(rows),
        drawing.extension_note(rows),
    )
    return figure


def judge(rows: Sequence[Row]) -> list[Claim]:
    """Each source of the basis against none, pre-training, and what was spent."""
    there = _arms_of(rows)
    gains = [_ahead(arm, PLAIN, rows) for arm in there if arm not in (PLAIN, BOTH)]
    if BOTH in there:
        gains.append(_ahead(BOTH, PRETRAINED, rows))
    spent = [
        always(
            f"spent of epsilon {epsilon:g}",
            [number(row, "spent") for row in select(rows, epsilon=epsilon)],
            epsilon + 1e-9,
        )
        for epsilon in distinct(rows, "epsilon")
    ]
    within = claim(
        "tab02",
        "no arm spends more than its epsilon",
        "The accountant's epsilon at the end is at most the target.",
        spent,
    )
    return [*gains, within]


def _arms_of(rows: Sequence[Row]) -> list[Arm]:
    """The arms that are among the rows."""
    return [arm for arm in ARMS if arm.rows(rows)]


def _public_alone(rows: Sequence[Row]) -> str:
    """What the public images are worth without the private ones, in words."""
    found = [number(row, "accuracy_before") for row in PRETRAINED.rows(rows)]
    if not found:
        return ""
    return f"Trained on the public ones alone: {sum(found) / len(found):.2f}."


def _ahead(arm: Arm, other: Arm, rows: Sequence[Row]) -> Claim:
    return claim(
        "tab02",
        f"{arm.name}: more accurate than {other.name}",
        f"At every epsilon, test accuracy is above that of “{other.name}”.",
        [
            paired(
                f"gain at epsilon {epsilon:g}",
                ends(select(arm.rows(rows), epsilon=epsilon), "test_accuracy"),
                ends(select(other.rows(rows), epsilon=epsilon), "test_accuracy"),
                low=0,
            )
            for epsilon in distinct(rows, "epsilon")
        ],
    )
