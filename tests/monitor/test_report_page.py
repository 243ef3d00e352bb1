"""Pages and traces of observed runs: what is drawn is what was recorded, in small files."""

import json
import math
import re
import tomllib
from collections import defaultdict
from dataclasses import asdict, replace
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from commands import call_command
from records import FINDINGS, facts, memory, step_line, write_record
from shardwise import svg
from shardwise.charts import Bar, areas_chart
from shardwise.errors import ConfigError
from shardwise.keys import checked_value
from shardwise.monitor.findings import Change, Diagnosis, Finding
from shardwise.monitor.lines import read_lines, read_newest
from shardwise.monitor.metrics import (
    ENGINE,
    PHASES,
    STEP_S,
    TRANSFERS,
    WAITED_MS,
    WAITS,
    OverRanks,
    OverSteps,
    summarize_steps,
)
from shardwise.monitor.page import LIMIT_BYTES, MOST_RUNS, ShownRun, report_html
from shardwise.monitor.record import (
    DETAILS,
    FOLDER,
    Memory,
    StepLine,
    Timeline,
    read_run,
    read_step,
)
from shardwise.monitor.summary import (
    figures_of,
    kinds_shown,
    metric_curve,
    not_numbers,
    phase_seconds,
    recorded_trace,
    saves_of,
    settled,
    unit_rows,
    value_curve,
)
from shardwise.svg import OTHER, colour_of

run_command = partial(call_command, "report")

NEVER_CLOSED = {"meta", "br"}
WAITED = {WAITED_MS: OverRanks(50.0, 50.0, 50.0, 0, 1)}


class Outline(HTMLParser):
    """The elements of a page; it fails where one is closed that is not the innermost."""

    def __init__(self, page):
        super().__init__()
        self.attributes = []
        self.tags = []
        self.open = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


def pictures(page):
    found = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    return [ElementTree.fromstring(each) for each in found]


def line(step, low, middle, high, num_steps=1):
    metrics = {STEP_S: OverRanks(low, middle, high, 0, 1)}
    return StepLine(step, num_steps, 1.0, metrics, {"loss": middle})


def test_a_short_curve_has_every_line_and_a_long_one_keeps_each_extreme():
    lines = [line(step, 1.0, 2.0, 3.0) for step in range(1, 101)]
    assert metric_curve(lines, STEP_S, 100) == [(n, 1.0, 2.0, 3.0, 1) for n in range(1, 101)]
    lines[56] = line(57, 0.5, 4.0, 99.0)
    columns = metric_curve(lines, STEP_S, 10)
    assert len(columns) == 10 and sum(column.weight for column in columns) == 100
    spiky = [column for column in columns if column.high == 99.0]
    assert len(spiky) == 1 and spiky[0].low == 0.5
    assert spiky[0].middle == pytest.approx((4.0 + 2.0 * (spiky[0].weight - 1)) / spiky[0].weight)
    assert columns[-1].step == 100


def test_a_line_about_many_steps_weighs_as_many():
    lines = [line(1, 1, 1, 1), line(2, 1, 1, 1), line(100, 5, 5, 5, num_steps=98)]
    (column,) = metric_curve(lines, STEP_S, 1)
    assert column.middle == pytest.approx((2 * 1 + 98 * 5) / 100)


def test_what_is_no_number_is_a_gap_of_its_curve():
    for value in (None, 1.7e308):  # sums of such are not finite
        text = step_line(7, 1, {}, loss=value)
        lines = [line(6, 1, 1, 1), read_step(json.loads(text)), line(8, 2, 2, 2)]
        assert [column.step for column in value_curve(lines, "loss", 10)] == [6, 8]
        assert not_numbers(lines, "loss") == [7]


def test_a_value_of_one_step_is_seen_in_a_line_of_many_and_in_columns_of_many_lines():
    numbered = [(step, {"loss": 2.0, STEP_S: 1.0}) for step in range(1, 2001)]
    numbered[1206] = (1207, {"loss": 1000.0, STEP_S: 9.0})
    numbered[1550] = (1551, {"loss": math.nan, STEP_S: 1.0})
    lines = []
    for last in range(20, 2001, 20):
        steps = summarize_steps(numbered[last - 20 : last])
        each = replace(line(last, 1.0, 1.0, 1.0, 20), values={"loss": 2.0})
        each = replace(each, values_over_steps=steps, metrics_over_steps=steps)
        lines.append(read_step(json.loads(json.dumps(asdict(each)))))
    assert lines[60].values_over_steps["loss"] == OverSteps(2.0, 51.9, 1000.0, 1201, 1207)
    for most in (200, 10):
        assert max(value_curve(lines, "loss", most), key=lambda c: c.high).high == 1000.0
        assert sorted(c.high for c in metric_curve(lines, STEP_S, most))[-2:] == [1.0, 9.0]
    means = [column.middle * column.weight for column in value_curve(lines, "loss", 10)]
    assert sum(means) / 2000 == pytest.approx((1999 * 2 + 1000) / 2000)
    assert not_numbers(lines, "loss") == [1560]
    assert not summarize_steps([(1, {"loss": math.inf}), (2, {"loss": 1.7e308})] * 2)


def test_phases_and_what_remains_add_up_to_the_step(tmp_path):
    lines = read_run(write_record(tmp_path)).steps
    phases = phase_seconds(lines)
    assert phases["forward"] == 0.1 and phases["backward"] == 0.2 and phases["data"] == 0.05
    assert sum(phases.values()) == pytest.approx(0.6) and phases[ENGINE] > 0
    assert figures_of(lines)[STEP_S] == OverRanks(0.5, 0.6, 0.7, 0, 1)


def test_a_run_has_settled_in_the_later_half_of_its_steps_not_of_its_lines():
    lines = [line(step, 9.0, 9.0, 9.0) for step in range(1, 11)]
    lines += [line(step, 1.0, 1.0, 1.0, num_steps=10) for step in (20, 30, 40)]
    assert [each.step for each in settled(lines)] == [30, 40]
    assert figures_of(lines)[STEP_S].median == 1.0
    assert [each.step for each in settled(lines[:1])] == [1] and not settled([])


def test_a_save_is_what_it_took_in_all_steps_of_its_line(tmp_path):
    record = read_run(write_record(tmp_path, num_steps=40, every=2))
    saves = list(saves_of(record.steps))
    assert [save.step for save in saves] == [20, 40]
    assert {(save.save_s, save.stall_s) for save in saves} == {(4.0, 0.5)}


def test_units_that_are_alike_are_one_row():
    few = facts(num_units=5)
    rows = unit_rows(few)
    assert [(row.name, row.count) for row in rows] == [("(root)", 1), ("layers.0 to layers.3", 4)]
    other = replace(few.units[2], padding_bytes=9)
    apart = unit_rows(replace(few, units=(*few.units[:2], other, *few.units[3:])))
    assert [row.count for row in apart] == [1, 1, 1, 2]
    assert sum(row.count for row in unit_rows(facts(num_units=1000))) == 1000


def test_the_newest_lines_are_those_at_the_end_whatever_is_cut_short(tmp_path):
    file = write_record(tmp_path) / FOLDER / "rank-0.jsonl"
    every = [*read_lines(file)]
    rare = {"kind": "non_finite", "step": 3}
    with file.open("a") as cut:
        cut.write(json.dumps(rare) + "\n" + '{"kind": "timeline", "step": 50, "spans": [')
    assert read_newest(file, 2, DETAILS) == [*every[-4:], rare]
    assert read_newest(file, 100, DETAILS) == [*every, rare]
    assert read_newest(file.with_name("rank-9.jsonl"), 2, DETAILS) == []


def test_a_page_is_well_formed_and_loads_nothing(tmp_path):
    runs = write_record(tmp_path / "a"), write_record(tmp_path / "b", device="NVIDIA H100")
    page = report_html([ShownRun(path.name, read_run(path, newest=2)) for path in runs])
    outline = Outline(page)
    assert not outline.open
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(outline.tags)
    for tag, name, value in outline.attributes:
        assert name not in ("src", "href", "srcset", "data") and not name.startswith("on"), tag
        assert not re.search(r"https?:|//", value.replace("http://www.w3.org/2000/svg", "")), value
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert "@import" not in style and "url(" not in style and "http" not in style
    assert "prefers-color-scheme: dark" in style and 'name="viewport"' in page
    drawn = pictures(page)
    titles = [each[0].text for each in drawn]
    assert {"loss", "lr", "step time, s", "a: memory of step 32 on rank 0"} <= set(titles)
    assert "b: timeline of step 32, ms" in titles
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_kind_of_work_has_one_word_and_one_colour_in_bars_and_timelines(tmp_path):
    tables = tomllib.loads((Path(svg.__file__).parent / "svg.toml").read_text())
    assert len(set(tables["work"].values())) == len(tables["work"])
    assert {name for name, *_ in PHASES} | {ENGINE} <= tables["work"].keys()
    for phase in (*WAITS, *TRANSFERS, "unshard", "all_gather", "step"):
        assert colour_of(phase) == tables["work"][svg.name_of_kind(phase)]
    record = read_run(write_record(tmp_path))
    lines = [replace(each, metrics=each.metrics | WAITED) for each in record.steps]
    page = report_html([ShownRun("a", replace(record, steps=tuple(lines)))])
    bars, timeline = (
        {text.text: square.get("fill") for square, text in pairwise(drawn) if square.get("fill")}
        for drawn in pictures(page)
        if (drawn[0].text or "").startswith(("Where", "a: timeline"))
    )
    assert {"forward", "backward", "optimizer", "waiting for others"} <= timeline.keys()
    for word in ("forward", "backward", "waiting for others"):
        assert bars[word] == timeline[word] == tables["work"][word]
    shown = [
        {name: colour for colour, name in re.findall(r'background: (#\w+)"></span>([^<]+)<', each)}
        for each in re.findall(r"<figcaption>(.*?)</figcaption>", page)
    ]
    for legend, drawn in zip(shown, (bars, timeline), strict=False):
        assert legend and legend.items() <= drawn.items()


def test_the_loss_of_one_run_is_drawn_with_its_held_out_values(tmp_path):
    record = read_run(write_record(tmp_path))
    steps = [replace(each, values={"loss": 2.0 + each.step}) for each in record.steps]
    at = steps[3].step
    held = OverSteps(2.5, 2.5, 2.5, at, at)
    for number in range(3, len(steps)):  # a line has the last value, if it is an earlier one too
        values = {**steps[number].values, "eval_loss": 2.5}
        loss = OverSteps(2.0, 2.0, 2.0, number, number)
        over = {"loss": loss, **({"eval_loss": held} if number == 3 else {})}
        steps[number] = replace(steps[number], values=values, values_over_steps=over)
    run = replace(record, steps=tuple(steps))
    drawn = {each[0].text: each for each in pictures(report_html([ShownRun("a", run)]))}
    assert "eval_loss" not in drawn and "held out" in [each.text for each in drawn["loss"]]
    dots = [each for each in drawn["loss"] if each.get("class") == "held-fill"]
    assert [dot[0].text for dot in dots] == [f"step {at}: 2.5"]
    two = report_html([ShownRun("a", run), ShownRun("b", run)])
    assert "eval_loss" in {each[0].text for each in pictures(two)}


def test_a_page_begins_with_model_and_command_and_its_numbers_have_their_points_in_line(tmp_path):
    record = read_run(write_record(tmp_path))
    record = replace(record, facts=replace(record.facts, command="python train.py --lr 0.1"))
    page = report_html([ShownRun("a", record)])
    assert "<title>a: Block, 4 k parameters: shardwise report</title>" in page
    assert page.index("python train.py --lr 0.1") < page.index("Findings")
    assert '0<span class="part">.6</span>' in page and '15<span class="part">.3</span>' in page
    cells = re.findall(r"<td>param (\w+)</td><td class=\"n\">(.*?)</td>", page)
    assert cells == [("shards", "1.00"), ("full", "&lt;0.01")] and "measured, MiB" in page


def test_names_of_a_run_are_never_markup(tmp_path):
    record = read_run(write_record(tmp_path))
    evil = '<script>alert("x")</script>'
    units = tuple(replace(unit, class_name=evil) for unit in record.facts.units)
    steps = tuple(replace(step, values={evil: 1.0 * step.step}) for step in record.steps)
    run = replace(record, facts=replace(record.facts, units=units, optimizer=evil), steps=steps)
    finding = Finding("X1", "warning", evil, evil, {evil: 1.0}, evil, (Change(evil, None, evil),))
    page = report_html([ShownRun(evil, run, Diagnosis((finding,)), notes=[evil])])
    assert "<script" not in page and not Outline(page).open


def test_a_long_run_of_many_ranks_is_a_small_page(tmp_path):
    path = write_record(tmp_path / "long", num_steps=100_000, num_ranks=64, every=50, num_units=60)
    record = read_run(path, newest=2)
    page = report_html([ShownRun("one", record)])
    assert len(page.encode()) < LIMIT_BYTES
    assert "100,000" in page and not Outline(page).open
    runs = [ShownRun(str(number), record) for number in range(MOST_RUNS)]
    assert len(report_html(runs).encode()) < LIMIT_BYTES
    with pytest.raises(ConfigError, match=f"1 to {MOST_RUNS} runs"):
        report_html([*runs, *runs])


def test_the_memory_picture_has_every_moment_and_the_plan():
    told = checked_value(Memory, memory(2, num_units=4), "memory")
    kinds = ["param_shards", "param_full"]
    assert [*kinds_shown(told.moments[0], facts())] == kinds  # of the CPU's process
    of_device = facts(device="NVIDIA H100")
    moments = [Bar(moment.phase, kinds_shown(moment, of_device)) for moment in told.moments]
    assert moments[0].parts == {"param_shards": 1 << 20, "param_full": 1000, OTHER: 3000}
    (drawn,) = pictures(areas_chart("a", moments, 100, beside=Bar("plan", {"param_shards": 512})))
    fills = [each.get("fill") for each in drawn]
    assert fills.count(colour_of("param_shards")) == 4  # measured, planned, the legend; "forward"
    said = [each[0].text for each in drawn if len(each)]
    assert "param full: up to 3.91 KiB" in said and "plan: param shards 512 B" in said
    (full,) = (e for e in drawn if len(e) and (e[0].text or "").startswith("param full"))
    heights = {pair.split(",")[1] for pair in full.attrib["points"].split()}
    assert len(heights) > 2  # it is seen to come and go
    few = pictures(areas_chart("a", moments, 1))[0]
    assert len([e for e in few if e.tag.endswith("polygon")]) == len([*kinds, OTHER])


def test_findings_are_told_with_change_and_gain(tmp_path):
    record = read_run(write_record(tmp_path))
    page = report_html([ShownRun("a", record, Diagnosis(FINDINGS))])
    assert page.index("verdict a") < page.index("verdict b")
    for words in ("bucket_bytes: 32MiB (now 1)", "0.5 to 0.75", "the plan", "0.25", "rank 1"):
        assert words in page


def test_the_command_writes_page_and_trace(tmp_path, capsys):
    run, trace = write_record(tmp_path / "run"), tmp_path / "trace.json"
    assert run_command([str(run), "--trace", str(trace)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>") and trace.exists()
    said = capsys.readouterr().out.splitlines()
    assert [words.split()[1] for words in said] == [f"{run / 'report.html'},", f"{trace},"]


def test_the_command_tells_what_is_wrong_with_a_folder(tmp_path, capsys):
    def said(*arguments):
        assert run_command(arguments) == 2
        return capsys.readouterr().err

    assert "no observed run" in said(str(tmp_path / "none"))
    run, trace = str(write_record(tmp_path / "run")), ("--trace", str(tmp_path / "t.json"))
    folder = tmp_path / "run" / FOLDER
    assert "there is no folder" in said(run, "-o", str(tmp_path / "no" / "page.html"))
    assert "one run at a time" in said(run, run, *trace)
    (folder / "rank-0.jsonl").unlink()
    (folder / "rank-1.jsonl").unlink()
    assert "no timeline is recorded" in said(run, *trace)
    (folder / "steps.jsonl").write_text("")
    assert "nothing is recorded yet: no step is over" in said(run)
    told = (folder / "run.json").read_text()
    (folder / "run.json").write_text(told.replace('"format": 1', '"format": 99'))
    wrong = said(run)
    assert "format 99, and this version reads 1" in wrong and "not the facts" not in wrong
    (folder / "run.json").write_text("[1]")
    assert "not the facts of a run" in said(run)


def test_the_plan_of_a_trained_run_stands_beside_what_was_measured(tmp_path):
    run = write_record(tmp_path)
    keys = {"dim": 32, "layers": 2, "heads": 2, "seq": 16, "stage": 3, "ranks": 2, "steps": 1}
    text = "".join(f"{key}: {value}\n" for key, value in keys.items())
    (run / "config.yaml").write_text(f"{text}warmup_steps: 0\n")
    assert run_command([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "The plan of these settings on 2 x" in page and "planned peak" in page
    assert run_command([str(run), "--no-plan"]) == 0
    assert "planned peak" not in (run / "report.html").read_text()
    (run / "config.yaml").write_text("dim: many\n")
    assert run_command([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "no plan beside it" in page and "dim: expected" in page


def test_the_plan_of_a_users_own_loop_is_asked_for_and_must_be_of_its_model(tmp_path, capsys):
    run, model = write_record(tmp_path), tmp_path / "model.py"
    numel = sum(unit.numel for unit in read_run(run).facts.units)
    model.write_text(
        "import torch\n"
        f"def factory(): return torch.nn.Linear({numel - 1}, 1)\n"
        f"def example_batch(n, seq): return torch.ones(n, {numel - 1})\n"
        "def loss(model, batch): return model(batch).sum()\n"
    )
    asked = f"'{model}:factory' --micro-batch 2 --seq 16"
    assert run_command([str(run), "--planned", asked]) == 0
    page = (run / "report.html").read_text()
    assert "The plan of these settings on 2 x" in page and "planned peak" in page
    for planned, told in (
        (f"{asked} --stage 9", "stage: expected"),
        ("llama-3-8b --gpu nothing", "accelerator 'nothing' is not in"),
        ("llama-3-8b", f"has 8,030,261,248 parameters, the run {numel:,}"),
    ):
        assert run_command([str(run), "--planned", planned]) == 2
        assert told in capsys.readouterr().err, planned


def events_of(trace):
    """Return complete events by rank and the name of the thread, in order."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def test_the_spans_of_a_trace_are_those_of_the_record(tmp_path):
    record = read_run(write_record(tmp_path, num_ranks=3))
    trace = json.loads(json.dumps(recorded_trace(record)))
    found = events_of(trace)
    begins = {e["args"]["step"]: e["ts"] for e in found[0, "steps"]}
    told = defaultdict(list)
    for rank, line in record.lines(Timeline):
        for name, phase, unit, begin_ms, length_ms, num_bytes in line.spans:
            told[rank, name].append((line.step, phase, unit, begin_ms, length_ms, num_bytes))
    assert set(told) == {key for key in found if key[1] != "steps"}
    for key, rows in told.items():
        assert len(rows) == len(found[key])
        for (step, phase, unit, begin_ms, length_ms, num_bytes), event in zip(
            rows, found[key], strict=True
        ):
            args = event["args"]
            assert (args["step"], args["phase"]) == (step, phase)
            assert args["unit"] == (unit or "(root)") and args.get("bytes", 0) == num_bytes
            assert abs(event["ts"] - begins[step] - 1e3 * begin_ms) < 0.11  # microseconds
            assert abs(event["dur"] - 1e3 * length_ms) < 0.21
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    steps = [[(e["name"], e["ts"]) for e in found[rank, "steps"]] for rank in range(3)]
    assert [name for name, _ in steps[0]] == ["step 2", "step 12", "step 22", "step 32"]
    assert steps[0] == steps[1] == steps[2]


def test_no_two_spans_of_a_thread_overlap(tmp_path):
    """Not by rounding either, or Perfetto would draw one under the other."""
    folder = write_record(tmp_path) / FOLDER
    rows = [["main", "forward", "", n * 0.33333, 0.33334, 0] for n in range(50)]
    line = {"kind": "timeline", "step": 50, "seconds": 0.0167, "spans": rows}
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for events in events_of(recorded_trace(read_run(tmp_path))).values():
        for one, other in pairwise(sorted(events, key=lambda e: e["ts"])):
            assert round(10 * (one["ts"] + one["dur"])) <= round(10 * other["ts"])
