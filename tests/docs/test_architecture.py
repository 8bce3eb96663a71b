import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()


def rooms(folder):
    inside = (ROOT / "src" / folder).iterdir()
    return sorted(path.name for path in inside if path.suffix == ".py" or path.is_dir())


@pytest.mark.parametrize("folder", ["dome", "dome_lab", "dome/trackers"])
def test_the_page_names_every_room(folder):
    named = [n for n in rooms(folder) if not n.startswith("__")]
    assert len(named) > 5
    assert not [n for n in named if f"{n}`" not in PAGE and f"{n}/`" not in PAGE]


def table(heading):
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n#")[0]
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [row[0].removeprefix("| ") for row in rows[2:]]


def test_at_most_forty_concepts_are_listed_and_their_classes_exist():
    concepts = table("Concepts")
    assert 20 < len(concepts) <= 40
    sources = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    classes = set(re.findall(r"^class (\w+)", sources, re.MULTILINE))
    words = [word for name in concepts for word in name.split(", ")]
    known = {"Rule", "State", "Row"}  # functions, and dictionaries
    named = [word for word in words if re.fullmatch(r"[A-Z]\w+", word)]
    assert not [word for word in named if word not in classes | known]


def test_the_rooms_of_the_picture_exist():
    picture = (ROOT / "docs" / "images" / "rooms.svg").read_text()
    names = re.findall(r'class="name"[^>]*>([^<]+)<', picture)
    found = {
        path.stem if path.is_file() else path.name
        for folder in ("dome", "dome_lab", "dome/trackers")
        for path in (ROOT / "src" / folder).iterdir()
    }
    rooms = {room for name in names for room in name.split(", ")}
    assert rooms - found == {"backward()", "after", "optimizer"}
