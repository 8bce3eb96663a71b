import re
from pathlib import Path

import pytest
from docs.raises import HOLE, messages

DOCS = Path(__file__).parents[2] / "docs"
ENTRY = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)
SECTION = re.compile(
    r"^\| message \| cause and cure \|\n.*\n((?:\|.*\n)+)", re.MULTILINE
)
FEWEST_LETTERS = 12  # of a fragment, so that "got" does not stand for everything


def listed():
    page = (DOCS / "troubleshooting.md").read_text()
    return [entry for table in SECTION.findall(page) for entry in ENTRY.findall(table)]


@pytest.fixture(scope="module")
def raised():
    return messages()


def test_every_error_is_listed(raised):
    fragments = [fragment for fragment, _ in listed()]
    missing = {
        place: message
        for place, message in raised.items()
        if not any(fragment in message for fragment in fragments)
    }
    assert not missing, "add a line to docs/troubleshooting.md for each"


def test_every_error_listed_is_still_raised(raised):
    stale = [f for f, _ in listed() if not any(f in m for m in raised.values())]
    assert not stale


def test_every_entry_says_something_and_has_a_cure():
    entries = listed()
    assert len(entries) == len({fragment for fragment, _ in entries})
    for fragment, cure in entries:
        assert len(re.sub(r"[^a-z]", "", fragment)) >= FEWEST_LETTERS, fragment
        assert cure.strip(), fragment


def test_every_line_of_the_tables_is_read():
    page = (DOCS / "troubleshooting.md").read_text()
    for table in SECTION.findall(page):
        assert len(ENTRY.findall(table)) == table.count("\n"), table


def test_the_reader_of_messages_sees_holes_sums_and_sentences(raised):
    texts = set(raised.values())
    assert f"rank must be at least 1, got {HOLE}" in texts
    assert any(m.startswith(f"{HOLE} is batch norm in training") for m in texts)
    assert any(m.startswith(f"cannot tell the {HOLE} samples apart") for m in texts)
    assert any(m.startswith(f"the gradient of {HOLE} cannot be") for m in texts)
