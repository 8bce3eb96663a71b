import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dome_lab.paper.claims import Claim, write_claims
from dome_lab.paper.figures import full_name, load_figure
from dome_lab.paper.reproduce import make_plan
from dome_lab.report.claims import (
    claims_markdown,
    read_claims,
    scales_markdown,
)

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results" / "cpu"
STORED = read_claims(RESULTS / "claims.json")
JUDGED = [
    (scale, short)
    for scale in ("cpu", "full")
    if (path := DOCS / "results" / scale / "claims.json").exists()
    for short in sorted({claim.figure for claim in read_claims(path)})
]


def test_a_claim_is_a_line_with_its_numbers_and_no_stray_bars(tmp_path):
    claim = Claim(
        figure="fig03",
        name="a|b",
        statement="|x| grows",
        verdict="holds",
        numbers={"gain": 0.25, "gain, low": 0.1, "gain, high": 0.4},
        explanation="",
        p=0.01,
    )
    write_claims(tmp_path / "claims.json", [claim])
    read = read_claims(tmp_path / "claims.json")
    assert read == [claim]
    line = claims_markdown(read).splitlines()[2]
    assert (
        line
        == "| fig03 | a\\|b. \\|x\\| grows | holds | stands | gain 0.25 [0.1, 0.4] |"
    )


def test_a_claim_at_full_scale_is_next_to_the_same_one_at_the_small_scale():
    small = Claim("fig01", "similar", "It is.", "undecided", {"gain": 0.1}, "")
    large = [
        replace(small, verdict="holds", numbers={"gain": 0.2}),
        replace(small, name="ahead after as many seconds", verdict="does not hold"),
    ]
    assert scales_markdown([small], large).splitlines()[2:] == [
        "| fig01 | similar | undecided | holds | gain 0.1 | gain 0.2 |",
        "| fig01 | ahead after as many seconds | - | does not hold | - | gain 0.1 |",
    ]


def test_the_appendix_has_both_scales_once_there_are_both(tmp_path, appendix):
    for scale in ("cpu", "full"):
        (tmp_path / scale).mkdir()
        claim = Claim("fig01", "similar", "It is.", "holds", {"gain": 0.1}, "")
        write_claims(tmp_path / scale / "claims.json", [claim])
    page = appendix.page(tmp_path)
    assert "| fig01 | similar | holds | holds | gain 0.1 | gain 0.1 |" in page
    assert "](full/fig01_cifar10_dynamics.png)" in page


@pytest.fixture
def appendix():
    sys.path.insert(0, str(DOCS.parent / "tools"))
    import appendix

    return appendix


def test_the_appendix_shows_the_verdicts_that_are_stored(appendix):

    page = appendix.PAGE.read_text(encoding="utf-8")
    assert claims_markdown(STORED) in page
    assert page == appendix.page(), "run python tools/appendix.py"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    found = {}
    for scale in dict.fromkeys(scale for scale, _ in JUDGED):
        folder = tmp_path_factory.mktemp(scale)
        for rows in (DOCS / "results" / scale).glob("*.jsonl"):
            (folder / rows.name).write_bytes(rows.read_bytes())
        names = sorted(full_name(short) for s, short in JUDGED if s == scale)
        modules = {name: load_figure(name) for name in names}
        found[scale] = make_plan(modules, scale, folder)
    return found


@pytest.mark.parametrize(("scale", "short"), JUDGED)
def test_stored_verdicts_follow_from_stored_rows(scale, short, plans):
    name, plan, results = full_name(short), plans[scale], DOCS / "results" / scale
    (planned,) = (figure for figure in plan.figures if figure.name == name)
    parts = planned.parts(plan.found)
    assert parts.num_ready > 0
    rows = [row for job in parts.jobs for row in plan.found[job.key]]
    judged = load_figure(name).judge(rows)
    every = read_claims(results / "claims.json")
    stored = [claim for claim in every if claim.figure == short]
    assert [(c.name, c.verdict) for c in judged] == [
        (c.name, c.verdict) for c in stored
    ]
    for now, then in zip(judged, stored, strict=True):
        assert now.numbers == pytest.approx(then.numbers, nan_ok=True)
    assert (results / f"{name}.png").stat().st_size > 1000
