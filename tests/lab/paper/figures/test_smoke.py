from functools import cache

import pytest
from matplotlib import pyplot

from dome_lab.paper import drawing
from dome_lab.paper.claims import FAILS, HOLDS, UNDECIDED
from dome_lab.paper.figures import figure_names, load_figure, runs_so_far
from dome_lab.paper.rows import append_run, read_rows

pytestmark = pytest.mark.usefixtures("few_orders")


@cache
def rows_of(compute_run, run):
    return list(compute_run(run))


def smoke_rows(figure):
    config, found = figure.SCALES["smoke"], {}
    while missing := [
        run for run in runs_so_far(figure, config, found.get) if run not in found
    ]:
        found |= {run: rows_of(figure.compute_run, run) for run in missing}
    return [row for rows in found.values() for row in rows]


@cache
def smoke_figure(name):
    figure = load_figure(name)
    drawn = figure.draw(smoke_rows(figure))
    # Laid out once, and not twice for every format: that is most of the work.
    drawn.draw_without_rendering()
    drawn.set_layout_engine(None)
    return drawn


@pytest.mark.paper
@pytest.mark.parametrize("name", figure_names())
def test_figure_computes_draws_and_judges_at_smoke_size(name, tmp_path):
    figure = load_figure(name)
    rows = smoke_rows(figure)
    drawn = smoke_figure(name)
    for kind in ("png", "pdf"):
        drawn.savefig(tmp_path / f"figure.{kind}")
        assert (tmp_path / f"figure.{kind}").stat().st_size > 10_000
    claims = figure.judge(rows)
    assert claims
    for claim in claims:
        assert claim.figure == name.partition("_")[0]
        assert claim.verdict in (HOLDS, FAILS, UNDECIDED)
        assert claim.statement.endswith(".")
        assert claim.explanation.endswith(".")
    assert pyplot.get_fignums() == []


@pytest.mark.paper
@pytest.mark.parametrize("name", figure_names())
def test_rows_from_disk_are_judged_as_they_were(name, tmp_path):
    figure = load_figure(name)
    rows = smoke_rows(figure)
    append_run(tmp_path / "rows.jsonl", rows)
    assert figure.judge(read_rows(tmp_path / "rows.jsonl")) == figure.judge(rows)


@pytest.mark.paper
@pytest.mark.parametrize("name", figure_names())
def test_a_reduced_figure_says_so(name):
    note = smoke_figure(name).get_supxlabel().replace("\n", " ")
    if name.startswith("fig"):
        assert "Not the paper's scale" in note
        assert "seeds 2 (5)" in note
    else:
        assert "Beyond the paper" in note
        assert "Mean of 2 seeds" in note


@pytest.mark.paper
@pytest.mark.parametrize("name", figure_names())
def test_no_text_leaves_the_figure(name):
    drawn = smoke_figure(name)
    whole = drawn.get_tightbbox()
    # A label half of a tick's width beyond the last tick is still on the paper.
    assert whole.x0 > -0.05
    assert whole.x1 < drawn.get_figwidth() + 0.05


def test_arms_are_told_apart_without_colour():
    assert len(set(drawing.DASHES.values())) == len(drawing.DASHES)
    assert len(set(drawing.MARKERS.values())) == len(drawing.MARKERS)
