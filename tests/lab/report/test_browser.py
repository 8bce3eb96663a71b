"""The page in headless Chromium; ``opened`` also fails on console output and requests.

Set DOME_SCREENSHOTS to a folder to look at what the tests see.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from made_rows import FILTERED, write_arms, write_loose

from dome_lab.paper.claims import FAILS, HOLDS, Claim, write_claims
from dome_lab.paper.rows import record_session
from dome_lab.report.page import write_report
from dome_lab.report.sections import file_sections

EVIL = "<script>alert(1)</script>"
PHONE = {"width": 360, "height": 740}
SPECTRA = {1: [8.0, 4.0, 2.0, 1.0], 4: [800.0, 4.0, 2.0, 1.0]}


def page_of(path, *paths, title="a report"):
    write_report(path, title, file_sections(paths))
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two settings, two arms, three seeds, verdicts, a spectrum that moves."""
    folder = tmp_path_factory.mktemp("report")
    rows = folder / "fig90_test.jsonl"
    write_arms(rows)
    write_arms(rows, filtered=0.6, run=replace(FILTERED, rate=100.0), drift=20.0)
    text = rows.read_text().splitlines()
    moved = [
        line.replace("[8.0, 4.0", "[800.0, 4.0") if '"epoch": 4' in line else line
        for line in text
    ]
    rows.write_text("\n".join(moved) + "\n")
    record_session(rows, {"figure": "fig90_test", "caption": "Made up."}, "cpu")
    claims = [
        Claim("fig90", "one", "Of this.", HOLDS, {"x": 1.0}, "Because."),
        Claim("fig90", "two", "Of that.", FAILS, {"x": 2.0}, "Because."),
    ]
    write_claims(folder / "claims.json", claims)
    return page_of(folder / "report.html", folder)


def look(page, name):
    folder = os.environ.get("DOME_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def lines_in(page, title):
    return chart(page, title).locator("path.line")


def chart(page, title):
    return page.locator("figure", has=page.get_by_text(title))


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_answers_stand_on_the_first_screen(opened, report):
    page = opened(report)
    look(page, "light")
    answers = page.locator(".answer")
    assert answers.count() == 4
    assert answers.nth(0).locator(".big").inner_text() == "Ahead, in 3 seeds"
    assert answers.nth(2).locator(".big").inner_text().startswith("60 %")
    for k in range(4):
        box = answers.nth(k).bounding_box()
        assert box["y"] + box["height"] < 800


def test_every_picture_is_drawn(opened, report):
    page = opened(report)
    assert page.locator("figure.chart").count() == 4  # the others do not change
    for figure in page.locator("figure.chart").all():
        drawn = figure.locator("path.line")
        assert drawn.count() >= 2, figure.locator("figcaption").inner_text()
        box = drawn.first.bounding_box()
        assert box["width"] > 100
        assert "NaN" not in figure.inner_html()
    assert lines_in(page, "Test accuracy").count() == 4
    assert chart(page, "Test accuracy").locator("path.band").count() == 4


def test_buttons_choose_settings_and_filters(opened, report):
    page = opened(report)
    no_filter = page.get_by_role("button", name="no filter")
    no_filter.click()
    assert no_filter.get_attribute("aria-pressed") == "false"
    assert lines_in(page, "Test accuracy").count() == 2
    page.get_by_role("button", name="rate 100").click()
    assert lines_in(page, "Test accuracy").count() == 1
    page.get_by_role("button", name="filter, rank 4").click()
    assert lines_in(page, "Test accuracy").count() == 0
    assert "nothing to show" in chart(page, "Test accuracy").inner_text()
    no_filter.click()
    assert lines_in(page, "Test accuracy").count() == 1


def test_the_slider_moves_the_spectrum_through_training(opened, report):
    page = opened(report)
    slider, output = page.get_by_role("slider"), page.locator("output")
    assert output.inner_text() == "epoch 4 of 4"
    at_end = lines_in(page, "Spectrum").first.get_attribute("d")
    slider.focus()
    page.keyboard.press("Home")
    assert output.inner_text() == "epoch 1 of 4"
    assert slider.get_attribute("aria-valuetext") == "epoch 1 of 4"
    at_start = lines_in(page, "Spectrum").first.get_attribute("d")
    assert at_start != at_end
    page.keyboard.press("ArrowRight")
    assert output.inner_text() == "epoch 2 of 4"
    page.keyboard.press("End")
    assert lines_in(page, "Spectrum").first.get_attribute("d") == at_end


def test_hovering_reads_means_and_intervals(opened, report):
    page = opened(report)
    figure = chart(page, "Test accuracy")
    box = figure.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
    tip = figure.locator(".tip")
    assert "epoch 4" in tip.inner_text()
    # 0.7 ± t(2) 0.01 / √3
    assert "no compression, filter, rank 4: 70 % [67.5, 72.5]" in tip.inner_text()
    look(page, "hover")
    page.mouse.move(0, 0)
    assert tip.is_hidden()


def test_arrow_keys_read_a_picture(opened, report):
    page = opened(report)
    figure = chart(page, "Training loss")
    figure.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    assert "epoch 1" in figure.locator(".tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert "epoch 2" in figure.locator(".tip").inner_text()
    page.keyboard.press("End")
    assert "epoch 4" in figure.locator(".tip").inner_text()
    page.keyboard.press("Escape")
    assert figure.locator(".tip").is_hidden()


def test_the_keyboard_reaches_everything_and_shows_where_it_is(opened, report):
    page = opened(report)
    reached, outlines = [], []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName"))
        style = "getComputedStyle(document.activeElement).outlineStyle"
        outlines.append(page.evaluate(style))
        if reached[-1] == "BODY":
            break
    for name in ("A", "BUTTON", "svg", "INPUT", "SUMMARY"):
        assert name in reached
    assert reached.count("svg") == 4
    assert "none" not in outlines[: reached.index("BODY") if "BODY" in reached else 40]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_reader_until_the_button_is_pressed(opened, report, scheme):
    page = opened(report, color_scheme=scheme)
    look(page, scheme)
    colours = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}
    assert background(page) == colours.pop(scheme)
    button = page.locator("#theme")
    assert button.get_attribute("aria-pressed") == str(scheme == "dark").lower()
    button.click()
    assert [background(page)] == list(colours.values())
    assert button.get_attribute("aria-pressed") == str(scheme == "light").lower()
    page.evaluate("localStorage.setItem('probe', 'kept')")
    page.reload()
    # Some browsers forget what a page that is a file stores.
    if page.evaluate("localStorage.getItem('probe')") == "kept":
        assert [background(page)] == list(colours.values())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(opened, report, scheme):
    page = opened(report, color_scheme=scheme)
    ratio = page.evaluate(
        """() => {
          const light = (c) => {
            const [r, g, b] = c.match(/[\\d.]+/g).map((v) => v / 255)
              .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const of = (e, p) => light(getComputedStyle(e)[p]);
          const card = of(document.querySelector(".answer"), "backgroundColor");
          return ["body", ".fine", ".good", ".bad", ".answer h3"].map((name) => {
            const text = of(document.querySelector(name), "color");
            return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05);
          });
        }"""
    )
    assert min(ratio) >= 4.5  # WCAG AA


def test_a_phone_scrolls_down_only(opened, report):
    page = opened(report, viewport=PHONE, has_touch=True)
    look(page, "phone")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for figure in page.locator("figure.chart").all():
        box = figure.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    page.locator("details").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    figure = chart(page, "Test accuracy")
    figure.locator("svg").tap(position={"x": 150, "y": 100})
    assert "epoch" in figure.locator(".tip").inner_text()


def test_turning_the_phone_draws_anew(opened, report):
    page = opened(report, viewport=PHONE)
    box = chart(page, "Test accuracy").locator("svg")
    narrow = box.get_attribute("viewBox")
    page.set_viewport_size({"width": 740, "height": 360})
    page.wait_for_function(
        "before => document.querySelector('figure svg').getAttribute('viewBox')"
        " !== before",
        arg=narrow,
    )


def test_verdicts_and_provenance_are_there(opened, report):
    page = opened(report)
    assert page.locator(".counts").inner_text().split() == (
        ["1", "✓", "holds", "1", "✗", "does", "not", "hold", "0", "?", "undecided"]
    )
    assert page.locator(".claim").count() == 2
    page.locator(".claim summary").first.click()
    assert page.get_by_text("Of this.").is_visible()
    assert page.locator("#provenance td").count() == 7
    page.locator("details", has_text="Settings and cost").locator("summary").click()
    assert page.get_by_text("4.0 s").first.is_visible()


def test_names_are_shown_as_text(opened, tmp_path):
    rows = [{"step": s, "loss": 1 / (s + 1), EVIL: s, "run": EVIL} for s in range(3)]
    rows += [{"step": s, "loss": 2.0, "run": "other"} for s in range(3)]
    own = write_loose(tmp_path / "own.jsonl", rows)
    page = opened(page_of(tmp_path / "page.html", own, title=EVIL))
    assert page.locator("h1").inner_text() == EVIL
    assert page.title() == EVIL
    assert page.locator(".chip").first.inner_text() == EVIL
    figure = chart(page, "loss")
    figure.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    assert f"{EVIL}: 1" in figure.locator(".tip").inner_text()
    assert page.evaluate("document.scripts.length") == 2


def test_one_epoch_of_one_seed_is_drawn_too(opened, tmp_path):
    rows = write_arms(
        tmp_path / "rows.jsonl", run=replace(FILTERED, epochs=1), shifts=(0.0,)
    )
    page = opened(page_of(tmp_path / "page.html", rows))
    assert chart(page, "Test accuracy").locator("circle").count() == 2
    assert "NaN" not in page.locator(".charts").inner_html()
    assert page.get_by_role("slider").count() == 0  # one time: nothing to choose


def test_many_runs_begin_with_few_lines(opened, tmp_path):
    rows = tmp_path / "rows.jsonl"
    for rate in (2.0, 4.0, 8.0, 16.0):
        write_arms(rows, run=replace(FILTERED, rate=rate), shifts=(0.0, 0.01))
    page = opened(page_of(tmp_path / "page.html", rows))
    assert lines_in(page, "Test accuracy").count() == 2
    page.get_by_role("button", name="rate 4").click()
    assert lines_in(page, "Test accuracy").count() == 4


def test_the_page_is_small(report):
    assert report.stat().st_size < 100_000
