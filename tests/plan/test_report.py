"""Plans as JSON facts, HTML pages and SVG pictures."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from decoders import SHAPE, cluster_of_ranks, make_model, make_plan
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.planning import Plan
from shardwise.plan.report.facts import goodput_facts, plan_facts, scaling_facts, search_facts
from shardwise.plan.report.page import full_page, memory_svg, plans_html, step_svg
from shardwise.plan.searching import Limits, SearchResult, Space, search
from shardwise.plan.timing.scaling import ScalingRow, expected_goodput, scaling_rows
from shardwise.plan.timing.scenario import Checkpoints, Failures, Scenario

HOSTILE = "</title><script>alert('&\"')</script>"
UNIT = re.compile(r"^num_|(_bytes|_s|_per_s|_fraction)$")
NO_FIGURES = {"candidate", "micro_batch"}  # settings, and which micro-batch it was


def figures(value: Any, key: str = "", has_unit: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield every number with its key and whether the key, or one above it, has a unit."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in NO_FIGURES:
                yield from figures(inner, name, has_unit or bool(UNIT.search(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, key, has_unit)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value, has_unit


@pytest.fixture(scope="module")
def made() -> Plan:
    return make_plan(
        stage=3,
        num_shards=4,
        num_replicas=2,
        micro_batch=2,
        accumulation=6,
        offload=Offload(optimizer="cpu", fraction=0.5),
    )


@pytest.fixture(scope="module")
def searched() -> SearchResult:
    space = Space(Candidate(num_shards=4), micro_batches=(1, 2), prefetch_units=(1,))
    return search(make_model(), cluster_of_ranks(4), space, Limits(max_memory_bytes=3 << 30))


def all_facts(made: Plan, searched: SearchResult) -> list[Any]:
    scenario = Scenario(
        num_shards=8, failures=Failures(1000, 60, 300), checkpoints=Checkpoints(600, 1, 2, 60)
    )
    rows = scaling_rows([ScalingRow(8, 0.1, 100, 0.01, 1000), ScalingRow(16, 0.1, 200)])
    return [
        plan_facts(made),
        search_facts(searched),
        scaling_facts(rows),
        goodput_facts(expected_goodput(0.5, scenario)),
    ]


def figures_of(facts: Any) -> list[tuple[str, Any, bool]]:
    return list(figures(facts))


def test_every_figure_has_its_unit_in_a_key_and_bytes_are_whole(
    made: Plan, searched: SearchResult
) -> None:
    for facts in all_facts(made, searched):
        found = figures_of(facts)
        assert len(found) >= 8
        assert [key for key, _, has_unit in found if not has_unit] == []
        for key, value, _ in found:
            if key.endswith("_bytes") or key.startswith("num_"):
                assert isinstance(value, int) or key == "num_lost_steps_per_failure", key
            if key.endswith("_fraction"):
                assert 0 <= value <= 1, key


def test_facts_say_what_the_plan_says(made: Plan, searched: SearchResult) -> None:
    facts = plan_facts(made)
    assert facts["memory"]["peak"]["total_bytes"] == sum(
        facts["memory"]["peak"]["lines_bytes"].values()
    )
    assert facts["time"]["step_s"] == made.step_s
    assert facts["time"]["num_tokens_per_step"] == made.tokens_per_step
    assert facts["candidate"]["accumulation"] == 6
    assert facts["candidate"]["offload"]["optimizer"] == "cpu"
    assert facts["num_params"] == SHAPE.num_params
    found = search_facts(searched)
    assert len(found["pareto"]) + len(found["rejected"]) == found["num_candidates"]
    assert found["winner"]["label"] == found["pareto"][0]["label"]


class Page(HTMLParser):
    """Collects tags, what they refer to, and whether every one is closed."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("href", "src", "xlink:href", "action", "data")
        self.refers += [v or "" for k, v in attrs if k in names]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile(made: Plan) -> Plan:
    names = (HOSTILE,) * len(made.unit_names)
    return replace(made, model=HOSTILE, unit_names=names, notes=(HOSTILE,), assumptions=(HOSTILE,))


@pytest.mark.parametrize("is_hostile", [False, True])
def test_a_page_is_whole_loads_nothing_and_escapes_every_name(made: Plan, is_hostile: bool) -> None:
    shown = hostile(made) if is_hostile else made
    text = full_page(plans_html([shown]), shown.model)
    page = Page(text)
    assert page.open == []
    assert page.refers == []
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|(src|href)=", text)
    assert shown.model in page.text
    assert page.tags.count("svg") == 2


def test_the_page_of_a_search_shows_the_best_plans_and_why_others_lost(
    searched: SearchResult,
) -> None:
    page = Page(full_page(plans_html(searched.pareto, searched.reasons), "search"))
    assert page.open == []
    for made in searched.pareto[:5]:
        assert made.label in page.text
    assert all(r.reason in page.text for r in searched.rejected)


def test_a_search_without_a_winner_is_a_page_too() -> None:
    space = Space(Candidate(num_shards=4), micro_batches=(1,))
    nothing = search(make_model(), cluster_of_ranks(4), space, Limits(max_memory_bytes=1))
    page = Page(full_page(plans_html(nothing.pareto, nothing.reasons), "search"))
    assert page.open == []
    assert "no candidate keeps the limits" in page.text
    assert "alone" in page.text


@pytest.mark.parametrize("draw", [memory_svg, step_svg])
@pytest.mark.parametrize("is_hostile", [False, True])
def test_pictures_are_well_formed_and_stay_inside_their_frame(
    draw: Any, is_hostile: bool, made: Plan
) -> None:
    root = ElementTree.fromstring(draw(hostile(made) if is_hostile else made))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    bars = [e for e in root.iter() if e.tag.endswith("}rect")]
    assert bars
    for bar in bars:
        x, y = float(bar.attrib["x"]), float(bar.attrib["y"])
        assert 0 <= x <= x + float(bar.attrib["width"]) <= width
        assert 0 <= y <= y + float(bar.attrib["height"]) <= height
    assert [e.tag for e in root if e.tag.endswith("}title") or e.tag.endswith("}desc")]


def test_the_memory_picture_is_as_long_as_its_bytes(made: Plan) -> None:
    root = ElementTree.fromstring(memory_svg(made))
    widths: dict[str, float] = {}
    for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
        title = bar.find("{http://www.w3.org/2000/svg}title")
        if title is not None and title.text and " of " in title.text:
            phase = title.text.split(" of ")[0]
            widths[phase] = widths.get(phase, 0) + float(bar.attrib["width"])
    totals = {m.phase: m.ledger.total for m in made.played.peaks}
    largest = max(totals, key=lambda phase: totals[phase])
    for phase, total in totals.items():
        expected = widths[largest] * total / totals[largest]
        assert widths[phase] == pytest.approx(expected, abs=1.0)


def test_a_notebook_shows_plans_and_searches(made: Plan, searched: SearchResult) -> None:
    assert "<svg" in made._repr_html_()
    assert "<svg" in searched._repr_html_()
