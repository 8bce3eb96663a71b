import contextlib
import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root Chromium has no sandbox; without the others it looks for updates.
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: DOME_CHROMIUM, one on the path, or Playwright's own."""
    from playwright.sync_api import Error, sync_playwright

    given = os.environ.get("DOME_CHROMIUM")
    path = given or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            launched = playwright.chromium.launch(
                executable_path=path, args=list(OPTIONS)
            )
        except Error as error:
            why = (
                "no Chromium that starts: install one (Debian: apt-get install "
                "chromium; elsewhere: playwright install chromium), or set "
                f"DOME_CHROMIUM to its path. {str(error).splitlines()[0]}"
            )
            if os.environ.get("CI"):
                pytest.fail(why)
            pytest.skip(why)
        yield launched
        launched.close()


SIZE = {"width": 1100, "height": 800}


@contextlib.contextmanager
def watched_page(browser, **options):
    """A page, and the list of what goes wrong on it or is fetched from elsewhere."""
    context = browser.new_context(**{"viewport": SIZE} | options)
    page, faults = context.new_page(), []

    def ask(request):
        if not request.url.startswith(("file:", "data:")):
            faults.append(request.url)

    page.set_default_timeout(5000)
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append("a dialog opened"))
    page.on("request", ask)
    yield page, faults
    context.close()


@pytest.fixture(scope="module")
def window(browser):
    """Where tests that ask for nothing special open theirs: each is three processes."""
    with watched_page(browser) as watched:
        yield watched


@pytest.fixture
def opened(browser, window):
    """Opens a page, and in the end looks whether anything went wrong on it."""
    watched = [window]
    own = contextlib.ExitStack()

    def open_page(path, **options):
        if options:
            watched.append(own.enter_context(watched_page(browser, **options)))
        page, _ = watched[-1]
        page.goto(path.as_uri())
        return page

    with own:
        yield open_page
    told = [fault for _, faults in watched for fault in faults]
    window[1].clear()
    assert not told
