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
