import sys
from pathlib import Path

import pytest

from dome_lab.paper.claims import Claim, write_claims
from dome_lab.paper.figures import full_name, load_figure
from dome_lab.paper.reproduce import make_plan
from dome_lab.report.claims_markdown import claims_markdown, read_claims

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results" / "cpu"
STORED = read_claims(RESULTS / "claims.json")


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


def test_the_appendix_shows_the_verdicts_that_are_stored():
    sys.path.insert(0, str(DOCS.parent / "tools"))
    import appendix

    page = appendix.PAGE.read_text(encoding="utf-8")
    assert claims_markdown(STORED) in page
    assert page == appendix.page(), "run python tools/appendix.py"


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for rows in RESULTS.glob("*.jsonl"):
        (folder / rows.name).write_bytes(rows.read_bytes())
    names = sorted({full_name(claim.figure) for claim in STORED})
    return make_plan({name: load_figure(name) for name in names}, "cpu", folder)


@pytest.mark.parametrize("short", sorted({claim.figure for claim in STORED}))
def test_stored_verdicts_follow_from_stored_rows(short, plan):
    name = full_name(short)
    (planned,) = (figure for figure in plan.figures if figure.name == name)
    parts = planned.parts(plan.found)
    assert parts.num_ready > 0
    rows = [row for job in parts.jobs for row in plan.found[job.key]]
    judged = load_figure(name).judge(rows)
    stored = [claim for claim in STORED if claim.figure == short]
    assert [(c.name, c.verdict) for c in judged] == [
        (c.name, c.verdict) for c in stored
    ]
    for now, then in zip(judged, stored, strict=True):
        assert now.numbers == pytest.approx(then.numbers, nan_ok=True)
    assert (RESULTS / f"{name}.png").stat().st_size > 1000
