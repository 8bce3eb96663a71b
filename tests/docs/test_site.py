import re
import sys

import pytest
from docs.pages import DOCS, ROOT

mkdocs = pytest.importorskip("mkdocs", reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly: every warning is an error."""
    from subprocess import run

    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = run(
        [*command, "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_built_and_fetches_nothing_from_a_network(site):
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text()
        assert "<h1" in built
        fetched = (
            r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(?:https?:)?//'
        )
        assert not re.search(fetched, built), page


@pytest.mark.slow
def test_formulas_are_drawn_and_numbered(site):
    built = (site / "method.html").read_text()
    assert built.count("<math") > 50
    for number in (1, 5, 9, 10, 11, "a", "b", "c", "d", "e"):
        assert f'id="eq-{number}"' in built
    text = re.sub(r"<script.*?</script>", "", built, flags=re.DOTALL)
    assert not re.search(r"\\[a-zA-Z]+", text)  # no LaTeX is left over


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    import dome

    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    missing = [
        name
        for name in dome.__all__
        if not re.search(rf'id="dome\.[\w.]*{name}"|id="dome\.{name}[."]', text)
    ]
    assert not missing
