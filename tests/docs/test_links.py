from urllib.parse import urlsplit

import pytest
from docs.pages import PAGES, anchors, links, name


def fault(page, target):
    """What is wrong with a link of a page; None if nothing is."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        fine = parts.scheme in ("https", "http") and "." in parts.netloc
        return None if fine else "is no address"
    file = page if not parts.path else (page.parent / parts.path).resolve()
    if not file.exists():
        return "does not exist"
    if parts.fragment and parts.fragment not in anchors(file.read_text()):
        return "has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page):
    found = {target: fault(page, target) for target in links(page.read_text())}
    assert not {target: why for target, why in found.items() if why}


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("missing.md", "does not exist"),
        ("page.md#absent", "has no such heading"),
        ("#absent", "has no such heading"),
        ("https://nowhere", "is no address"),
        ("page.md#a-heading-of-rank", None),
        ("#a-heading-of-rank", None),
        ("https://example.org/page", None),
    ],
)
def test_the_checker_tells_good_links_from_bad(tmp_path, target, why):
    page = tmp_path / "page.md"
    page.write_text(f"# A heading, of `rank`\n\n[text]({target}) `[code](gone.md)`\n")
    assert links(page.read_text()) == [target]
    assert fault(page, target) == why
