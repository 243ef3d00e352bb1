"""Pages of runs and plans as a browser shows them, on a screen and on a phone, light and dark."""

from functools import partial

import pytest

from browser import browser, look_at
from commands import call_command
from records import FINDINGS, write_record
from shardwise.monitor.findings import Diagnosis
from shardwise.monitor.page import ShownRun, report_html
from shardwise.monitor.record import read_run

run_plan = partial(call_command, "plan")

KEYS = {"dim": 32, "layers": 2, "heads": 2, "seq": 16, "stage": 3, "ranks": 2, "steps": 1}
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    browser()  # nothing is made where nobody can look at it
    folder = tmp_path_factory.mktemp("pages")
    run, other = (
        read_run(write_record(folder / name, device=device))
        for name, device in (("run", "cpu"), ("other", "NVIDIA H100 80GB HBM3"))
    )
    judged = Diagnosis(FINDINGS)
    return {
        "one run": report_html([ShownRun("run", run, judged)]),
        "two runs": report_html([ShownRun("run", run), ShownRun("other", other, judged)]),
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable_on_any_screen_and_load_nothing(scheme, pages, tmp_path):
    seen = look_at(pages, WIDTHS, scheme == "dark", tmp_path)
    assert seen.pop("console") == []
    assert len(seen) == len(pages) * len(WIDTHS)
    for name, page in seen.items():
        assert page["isDark"] is (scheme == "dark") and page["numTexts"] > 500, name
        assert page["requests"] == [], name
        assert page["scroll"] <= 0, name
        for wrong in ("faint", "crossing", "cut", "unsaid"):
            assert page[wrong] == [], (name, wrong)


def test_what_a_reader_would_not_like_is_seen(tmp_path):
    """Let the looking itself be tested: a page with one of each mistake."""
    page = (
        '<!doctype html><body style="margin:0"><p style="color:#eee;background:#fff">faint</p>'
        '<div style="width:2000px">wide</div><img src="https://example.com/a.png">'
        '<script>console.error("loud")</script>'
        '<svg viewBox="0 0 100 50" width="100"><text y="20">one</text><text y="22">two</text>'
        '<text x="80" y="45">beyond</text></svg>'
        '<figure style="overflow:auto">cut<p style="width:900px"></p></figure>'
    )
    seen = look_at({"page": page}, (600,), False, tmp_path)
    found = seen["page at 600"]
    assert found["scroll"] > 0 and found["faint"][0][0] == "faint"
    assert found["crossing"] == [["one", "two"]] and found["cut"] == ["beyond"]
    assert found["unsaid"] == ["cut"]
    assert any("loud" in line for line in seen["console"])
    assert any("example.com" in line for line in seen["console"])
