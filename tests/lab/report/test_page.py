import json
import re
from html.parser import HTMLParser

import pytest
from made_rows import write_arms, write_loose

from dome_lab.report.page import html, write_report
from dome_lab.report.sections import file_sections

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;'


class Elements(HTMLParser):
    """Counts elements, and collects addresses."""

    def __init__(self, page):
        super().__init__()
        self.names, self.addresses = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset")]


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_same_rows_give_the_same_bytes_and_load_nothing(tmp_path):
    sections = file_sections([write_arms(tmp_path / "rows.jsonl")])
    page = html("title", sections)
    assert page == html("title", sections)
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/2000/svg", "", page)
    local = {"data:,", "#main"}
    assert set(Elements(page).addresses) <= local


def test_names_are_text_wherever_they_are_shown(tmp_path):
    rows = [{"step": 1, "loss": 1.0, EVIL: 2.0, "run": EVIL}]
    sections = file_sections([write_loose(tmp_path / "own.jsonl", rows)])
    page = html(EVIL, sections)
    elements = Elements(page).names
    assert elements.count("script") == 2
    assert "img" not in elements
    assert data_of(page)[0]["arms"] == [EVIL]


def test_numbers_on_the_page_are_those_of_the_rows(tmp_path):
    page = html("title", file_sections([write_arms(tmp_path / "rows.jsonl")]))
    (part,) = data_of(page)
    assert part["arms"] == ["no filter", "filter, rank 4"]
    plain, filtered = part["groups"]
    assert filtered["lines"]["test_accuracy"]["mean"] == pytest.approx([70.0] * 4)
    assert filtered["lines"]["train_loss"]["mean"] == pytest.approx([0.5] * 4)
    assert "removed" not in filtered["lines"]  # it does not change
    assert [s["time"] for s in filtered["spectra"]] == [1, 2, 3, 4]
    assert filtered["spectra"][0]["mean"] == pytest.approx([8, 4, 2, 1])
    assert not plain["spectra"]


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    sections = file_sections([write_arms(tmp_path / "rows.jsonl")])
    page = tmp_path / "report.html"
    write_report(page, "first", sections)
    before = page.read_text()
    monkeypatch.setattr("dome_lab.report.page._data", lambda part: {"x": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(page, "second", sections)
    assert page.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))
