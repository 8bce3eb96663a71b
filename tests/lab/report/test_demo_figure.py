import math

import pytest

from dome_lab.paper.comparison import Arm, Comparison, compare
from dome_lab.paper.drawing import save_picture
from dome_lab.paper.statistics import Interval
from dome_lab.report.demo_figure import draw, headline


def comparison(gain):
    def arm(accuracy, loss):
        return Arm(Interval(accuracy, 0.01), Interval(loss, 0.1), Interval(0.2, 0.01))

    arms = {"plain": arm(0.8, 1.0), "filtered": arm(0.8 + gain, 1.0 - gain)}
    return Comparison(2000.0, arms, Interval(gain, 0.02), Interval(-gain, 0.02))


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.05, "5 % lower loss, accuracy up from 80 to 85 %"),
        (0.01, "no clear change in loss, no clear change in accuracy"),
        (-0.05, "5 % higher loss, accuracy down from 80 to 75 %"),
    ],
)
def test_headline_says_what_happened(gain, words):
    expected = f"Gradients compressed 2,000-fold: with the filter {words}"
    assert headline(comparison(gain)) == expected


def rows():
    return [
        {
            "seed": seed,
            "arm": arm,
            "rate": rate,
            "epoch": epoch,
            "train_loss": 2 / epoch,
            "lr": 0.001,
            "processor_seconds": 1.0,
            "test_accuracy": 1 - math.exp(-epoch) / (1 + seed),
            "kept_norm": 0.9,
        }
        for rate in (None, 50.0)
        for arm in ("plain", "filtered")
        for seed in (0, 1)
        for epoch in (1, 2, 3)
    ]


def test_picture_is_written_whole_in_readme_size(tmp_path):
    path = tmp_path / "demo.png"
    save_picture(draw(rows(), compare(rows())), path)
    header = path.read_bytes()[:24]
    assert header[1:4] == b"PNG"
    assert int.from_bytes(header[16:20], "big") == 1600
    assert int.from_bytes(header[20:24], "big") == 700
    assert [p.name for p in tmp_path.iterdir()] == ["demo.png"]


def test_labels_of_equal_ends_do_not_overlap():
    figure = draw(rows(), compare(rows()))
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        one, other = (text.get_window_extent(renderer) for text in axes.texts)
        assert not one.overlaps(other)


def test_intervals_end_at_0_and_100_per_cent():
    figure = draw(rows(), compare(rows()))
    curves, _, by_rate = figure.axes
    (low, high) = curves.collections[0].get_datalim(curves.transData).intervaly
    assert 0 <= low < high <= 100
    ends = [
        y
        for bars in by_rate.collections
        for path in bars.get_paths()
        for y in path.vertices[:, 1]
    ]
    assert 0 <= min(ends) < max(ends) <= 100
