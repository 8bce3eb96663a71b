"""The docs stay short enough to be read."""

import re

from docs.pages import DOCS

# Made by programs from rows: to be looked up, not read.
GENERATED = {"appendix.md", "models.md"}


def words(text):
    return [word for word in text.split() if re.search(r"\w", word)]


def test_all_pages_together_have_at_most_22_000_words():
    pages = [page for page in DOCS.rglob("*.md") if page.name not in GENERATED]
    assert len(pages) > 30
    assert sum(len(words(page.read_text())) for page in pages) <= 22_000
