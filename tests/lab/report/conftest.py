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


@pytest.fixture
def opened(browser):
    """Opens a page, and in the end looks whether anything went wrong on it."""
    contexts, faults, asked = [], [], []

    def open_page(path, width=1100, height=800, **options):
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, **options)
        context.set_default_timeout(5000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: faults.append("a dialog opened"))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
