import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def maker():
    path = ROOT / "tools" / "support_table.py"
    spec = importlib.util.spec_from_file_location("support_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_say_what_make_matrix_found(maker):
    if not maker.RESULTS.exists():
        pytest.skip("make matrix has not been run yet")
    results = json.loads(maker.RESULTS.read_text())
    for page in maker.PAGES:
        text = page.read_text()
        assert maker.filled(text, results) == text, "run python tools/support_table.py"


def test_a_failure_is_shown(maker):
    assert "**2 failed**" in maker.told({"passed": 3, "failed": 2, "skipped": 0})
    assert maker.told(None) == "not run"
