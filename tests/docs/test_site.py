import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from docs.pages import DOCS, ROOT
from lab.report.conftest import browser  # noqa: F401 (a fixture)

pytest.importorskip("zensical", reason="the extra docs is not installed")
pytestmark = pytest.mark.slow
SOURCES = ("docs", "src", "website", "zensical.toml")
PLANTED = """
[a page](missing.md) [a heading](how-to/choose.md#absent) [a name][dome.absent]
"""


def copied(folder):
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder)
    return folder


def build(folder):
    """What ``make docs`` runs."""
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "website", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = copied(tmp_path_factory.mktemp("site"))
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_built_and_fetches_nothing_from_a_network(site):
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text()
        assert "<h1" in built
        fetched = (
            r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(?:https?:)?//'
        )
        assert not re.search(fetched, built), page


def test_formulas_are_drawn_and_numbered(site):
    built = (site / "explanation" / "method.html").read_text()
    assert built.count("<math") > 50
    for number in (1, 5, 9, 10, 11, "a", "b", "c", "d", "e"):
        assert f'id="eq-{number}"' in built
    text = re.sub(r"<script.*?</script>", "", built, flags=re.DOTALL)
    assert not re.search(r"\\[a-zA-Z]+", text)  # no LaTeX is left over


def test_the_reference_has_every_public_name(site):
    import dome

    text = "".join(
        page.read_text() for page in (site / "reference" / "api").glob("*.html")
    )
    missing = [
        name
        for name in dome.__all__
        if not re.search(rf'id="dome\.[\w.]*{name}"|id="dome\.{name}[."]', text)
    ]
    assert not missing


def test_a_broken_link_a_missing_heading_and_an_unknown_name_stop_the_build(tmp_path):
    folder = copied(tmp_path)
    index = folder / "docs" / "index.md"
    index.write_text(index.read_text() + PLANTED)
    done = build(folder)
    told = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert done.returncode != 0
    assert told.count("index.md:") == 3
    for fault in ("page does not exist", "anchor does not exist", "unresolved autoref"):
        assert fault in told


@contextmanager
def served(folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Asks the dialog, which is in a shadow tree, for the titles of what was found.
FOUND = """() => [...document.querySelectorAll("*")]
    .filter(e => e.shadowRoot)
    .flatMap(e => [...e.shadowRoot.querySelectorAll("a")])
    .map(a => a.getAttribute("href")).join(" ")"""
OPEN = """() => [...document.querySelectorAll("*")]
    .some(e => e.shadowRoot && e.shadowRoot.activeElement)"""


def test_the_search_finds_what_users_look_for(site, browser):  # noqa: F811
    wanted = {
        "baseline": "how-to/report",
        "rank without classes": "how-to/choose",
        "gradient accumulation": "how-to/choose",
        "LoRA": "how-to/trainers",
        "PowerSGD": "how-to/compress",
    }
    with served(site) as address:
        page = browser.new_page()
        page.set_default_timeout(30_000)
        for words, place in wanted.items():
            page.goto(f"{address}/index.html")
            page.wait_for_load_state("networkidle")
            page.keyboard.press("Control+k")
            page.wait_for_function(OPEN)
            page.keyboard.type(words)
            page.wait_for_function(f'({FOUND})().includes("{place}")')
        page.close()


# The tables of claims and pictures are looked up, not read.
APPENDIX = DOCS / "results" / "appendix.md"


def test_no_page_is_higher_than_six_thousand_pixels(site, browser):  # noqa: F811
    found = {}
    with served(site) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for source in sorted(DOCS.rglob("*.md")):
            name = source.relative_to(DOCS).with_suffix(".html")
            page.goto(f"{address}/{name}")
            found[source] = page.evaluate("document.documentElement.scrollHeight")
        page.close()
    assert found.pop(APPENDIX) > 6000
    assert not {source: height for source, height in found.items() if height > 6000}
