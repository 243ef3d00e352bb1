"""README and docs/: links resolve, names exist, code compiles, tables are right, examples run."""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from statistics import fmean

import pytest
import yaml

import programs
import shardwise
import shardwise.keys
from commands import call_command
from gallery import printed_by
from generate_accounting import held_bytes
from generate_bound import bound_tokens
from generate_pages import import_graph, module_name, pages, rooms
from palette import colours
from record_bound import facts, seconds
from record_mesh import groups as groups_of
from shardwise.axes import Axes
from shardwise.layout.segments import rows_layout
from shardwise.plan import account
from shardwise.stages import STAGES, Stage
from shardwise.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\bshardwise((?:\.[A-Za-z_]\w*)+)")
ADAM_MOMENTS = 2


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text()) if kind == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def test_every_relative_link_resolves():
    for page in PAGES:
        links = [link for link in LINK.findall(prose(page)) if "://" not in link]
        broken = [link for link in links if not (page.parent / link.split("#")[0]).exists()]
        assert not broken, f"{page_id(page)}: {broken}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def test_every_linked_section_exists():
    for page in PAGES:
        links = [link for link in LINK.findall(prose(page)) if "://" not in link and ".md#" in link]
        links += [page.name + link for link in LINK.findall(prose(page)) if link.startswith("#")]
        parts = [link.split("#") for link in links]
        broken = [link for link in parts if link[1] not in anchors_of(page.parent / link[0])]
        assert not broken, f"{page_id(page)}: {broken}"


def test_every_page_is_reached_from_the_index_or_the_readme():
    index = ROOT / "docs" / "index.md"
    entries = (index, ROOT / "docs" / "decisions" / "README.md")
    linked = {(e.parent / link).resolve() for e in entries for link in LINK.findall(e.read_text())}
    assert not {page.resolve() for page in PAGES} - linked - {index.resolve()}


def names_in(page: Path) -> Iterator[str]:
    """Yield dotted names under shardwise, from code blocks and from inline code."""
    blocks = [code for _, code in FENCE.findall(page.read_text())]
    for code in (*blocks, *re.findall(r"`([^`\n]+)`", prose(page))):
        yield from (match.strip(".") for match in NAME.findall(code))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_name_under_shardwise_exists(page):
    for name in names_in(page):
        found: object = shardwise
        for part in name.split("."):
            if not hasattr(found, part):
                found = importlib.import_module(f"shardwise.{name[: name.index(part)]}{part}")
            else:
                found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_calls_of_shardwise_name_parameters_that_exist(page):
    """Parameters of earlier versions, which calls take with a warning, are not in the pages."""
    for code in code_blocks(page, "python"):
        for node in ast.walk(ast.parse(code, page_id(page))):
            if not isinstance(node, ast.Call) or not NAME.fullmatch(ast.unparse(node.func)):
                continue
            called = attrgetter(ast.unparse(node.func).removeprefix("shardwise."))(shardwise)
            known = set(inspect.signature(called).parameters)
            named = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert named <= known, f"{page_id(page)}: {ast.unparse(node)}: {named - known}"


def test_every_cited_program_exists():
    for page in PAGES:
        cited = re.findall(r"\b(?:benchmarks|examples|tests)/[\w/-]+\.\w+", page.read_text())
        missing = [path for path in cited if not (ROOT / path).exists()]
        assert not missing, f"{page_id(page)}: {missing}"


def test_every_cited_note_stands_in_the_code():
    titles = {
        title
        for path in SOURCES
        for title in re.findall(r"^ *Note \[(.+)\]$", path.read_text(), re.M)
    }
    for page in PAGES:
        cited = re.findall(r"Note \[([^\]]+)\]", " ".join(page.read_text().split()))
        assert set(cited) <= titles, f"{page_id(page)}: {set(cited) - titles}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_name_that_links_to_a_file_stands_in_that_file(page):
    for name, target in re.findall(r"\[`([\w.]+)(?:\(\))?`\]\(([\w/.-]+\.py)\)", page.read_text()):
        path = (page.parent / target).resolve()
        missing = [part for part in name.split(".") if part not in path.read_text()]
        assert name == path.name or not missing, f"{page_id(page)}: {name} in {path.name}"


def test_every_cited_method_or_field_stands_in_the_code():
    defined = {
        f"{outer.name}.{inner.name if isinstance(inner, ast.FunctionDef) else inner.target.id}"
        for path in SOURCES
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, ast.ClassDef)
        for inner in outer.body
        if isinstance(inner, (ast.FunctionDef, ast.AnnAssign))
    }
    classes = {name.split(".")[0] for name in defined} - {"Precision"}
    for page in PAGES:
        cited = re.findall(r"`([A-Z]\w+\.\w+)", prose(page))
        wrong = {name for name in cited if name.split(".")[0] in classes} - defined
        assert not wrong, f"{page_id(page)}: {wrong}"


@pytest.mark.parametrize("name", pages())
def test_a_page_that_is_made_from_the_source_is_current(name):
    """`make pages` writes them."""
    assert (ROOT / "docs" / name).read_text() == pages()[name]


def test_the_list_of_files_has_each_file_once_below_those_that_it_imports():
    page = ROOT / "docs" / "files.md"
    linked = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    listed = [path for path in linked if path.suffix == ".py"]
    files = [path for path in SOURCES if path.name not in ("__init__.py", "__main__.py")]
    assert sorted(listed) == sorted(files)
    names = [module_name(path) for path in listed]
    graph = import_graph()
    for number, name in enumerate(names):
        assert not graph[name] & set(names[number + 1 :]), name


def test_the_architecture_names_the_rooms_in_their_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/, `]+)` \|", page, re.MULTILINE)
    listed = re.findall(r"\w+(?=/)", " ".join(rows))
    assert listed == [room for room in rooms() if (ROOT / "src" / "shardwise" / room).is_dir()]


def test_the_architecture_quotes_the_table_of_stages():
    quoted = code_blocks(ROOT / "docs" / "architecture.md", "python")[0]
    assert quoted in (ROOT / "src" / "shardwise" / "stages.py").read_text()


def test_every_key_of_the_train_command_is_in_its_table():
    page = ROOT / "docs" / "how-to" / "train-command.md"
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", page.read_text(), re.MULTILINE)
    fields = TrainConfig.model_fields
    assert rows == [(key, fields[key].description) for key in shardwise.keys.names_in(TrainConfig)]


def test_the_picture_of_a_ranks_bytes_multiplies_what_the_planner_says():
    """For other numbers than those of which its rates were made, but for blocks of codes."""
    data = json.loads((ROOT / "docs" / "site" / "data" / "accounting.json").read_text())
    for key, rates in data["rates"].items():
        offload, stage, *how = key.split("/")
        params, ranks = 12_000_000 + (offload == "none"), 12  # a plan of tensors counts padding
        held = held_bytes(params, ranks, offload, int(stage), *how)
        found = dict.fromkeys(held, 0)
        for place, kind, whole, of_slice in rates:
            names = data["places"][place], [*data["kinds"]][kind]
            found[names] = whole * params + of_slice * -(-params // ranks)
        assert found == pytest.approx(held, abs=16), key


def test_the_recorded_step_is_small_and_holds_what_the_planner_says():
    path = ROOT / "docs" / "site" / "data" / "step.json"
    assert path.stat().st_size < 60_000
    for stage, step in json.loads(path.read_text())["stages"].items():
        planned = account(9_423_848, 2, int(stage), "fp32").lines
        for rank in step["ranks"]:
            held = rank["memory"][-1][1]  # at the end of the step
            params = held["param_shards"] + held.get("param_full", 0)
            assert params == pytest.approx(planned["parameters"], rel=1e-3)
            assert held["optimizer_state"] == pytest.approx(planned["optimizer_state"], rel=1e-3)


def test_the_recorded_owners_are_those_of_the_layout_and_hold_what_the_stages_say():
    data = json.loads((ROOT / "docs" / "site" / "data" / "owner.json").read_text())
    layout, numel = rows_layout([data["shape"]], 4), prod(data["shape"])
    updated = set()
    for stage in STAGES:
        moments = {each["moment"]: each["ranks"] for each in data["stages"][str(stage.number)]}
        for ranks in moments.values():
            for number, rank in enumerate(ranks):
                piece = layout.piece(0, number)
                owns = [piece.lo, piece.hi] if stage.shards_state else [0, numel]
                assert rank["owns"] == owns and rank["adam"] == owns[1] - owns[0]
                assert (rank["full"] == "no") is (None in rank["values"])
            if any(rank["full"] == "fresh" for rank in ranks):
                assert all(rank["values"] == ranks[0]["values"] for rank in ranks)
        rests = "no" if stage.frees_after_backward else "stale" if stage.shards_state else "fresh"
        assert {rank["full"] for rank in moments["at rest, without gradients"]} == {rests}
        between = moments["between two micro-batches"]
        reduces = stage.reduce_every == "micro_batch"
        assert {rank["grad"] for rank in between} == {"mean" if reduces else "own"}
        if reduces:
            own = [rank["grads"] for rank in moments["its layer's backward"]]
            means = [value for rank in between for value in rank["grads"]]
            assert means == pytest.approx(
                [fmean(each) for each in zip(*own, strict=True)], abs=2e-3
            )
        step = moments["after the optimizer's step"]
        updated.add(tuple(step[0]["values"][:6] + step[3]["values"][18:]))
    assert len(updated) == 1


def test_the_picture_of_the_mesh_has_the_groups_that_ranks_make():
    data = json.loads((ROOT / "docs" / "site" / "data" / "mesh.json").read_text())
    for key, groups in data["dense"].items():
        pp, replicate, cp, tp = map(int, key.split("/"))
        axes = Axes(pp=pp, dp_replicate=replicate, cp=cp, tp=tp).over(16)
        assert groups["part"] == "".join(f"{axes.part_of_batch(rank)[0]:x}" for rank in range(16))
        degrees = {"pp": pp, "dp_replicate": replicate, "dp_shard": axes.dp_shard, "cp": cp}
        degrees |= {"tp": tp, "fsdp": axes.dp_shard * cp, "loss": replicate * axes.dp_shard * cp}
        assert {name: 16 // len(set(groups[name])) for name in degrees} == degrees
    degrees = 2, 1, 2, 2, 4
    key = "/".join(map(str, degrees))
    made = groups_of(degrees, data["axes"])
    part = data["dense"][key.removesuffix("/4")]["part"]
    assert made | {"part": part} == data["dense"][key.removesuffix("/4")] | data["experts"][key]


def test_the_bound_is_made_of_the_planners_facts_and_its_plans_wait_below_it():
    data = json.loads((ROOT / "docs" / "site" / "data" / "bound.json").read_text())
    assert facts() == {name: data[name] for name in facts()}
    for link, tokens in (("pcie5", 4096), ("ethernet-25", 131_072)):
        made = data["plans"][link][data["tokens"].index(tokens)]
        assert made == pytest.approx(seconds(link, tokens), rel=1e-3)
    gathers, reductions = (sent / data["params"] for sent in data["sent_bytes"])
    # In bf16 twice, but for the last unit, and in fp32; 7 of 8 shares are sent.
    assert 1.8 * 2 * 7 / 8 < gathers < 2 * 2 * 7 / 8 and reductions == pytest.approx(4 * 7 / 8)
    for link, plans in data["plans"].items():
        bound = bound_tokens(data, link)
        for tokens, (step, waited) in zip(data["tokens"], plans, strict=True):
            if tokens < bound / 3:
                assert waited > 0.1 * step, (link, tokens)
            if tokens > bound:
                assert waited < 0.06 * step, (link, tokens)


def test_every_error_is_explained_with_a_remedy():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \| (.*) \| ", pages()["errors.md"], re.MULTILINE)
    errors = {n for n in dir(importlib.import_module("shardwise.errors")) if n[0].isupper()}
    assert errors <= {name for name, *_ in rows}
    assert not [row for row in rows if row[0] in errors - {"ShardwiseError"} and not row[2]]


def table_of_costs() -> dict[int, tuple[str, str, str]]:
    """Return (fp32 bytes, bf16 bytes, passes) of the README's table, by stage, as formulas."""
    rows = re.findall(
        r"^\| (\d) \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    return {int(stage): (fp32, bf16, passes) for stage, fp32, bf16, passes in rows}


def value_of(formula: str, num_ranks: int, num_micro_batches: int) -> float:
    assert re.fullmatch(r"[\dNM+*/ ]+", formula), formula
    result: float = eval(formula, {"N": num_ranks, "M": num_micro_batches})
    return result


def bytes_of(stage: Stage, compute_bytes: int, num_ranks: int) -> float:
    """Count the bytes of one parameter: fp32 masters, gradients and moments, and full copies."""
    state = 4 / num_ranks if stage.shards_state else 4.0
    grad = 4.0 if stage.reduce_every == "step" else state
    if stage.frees_after_backward:
        value = state
    elif compute_bytes == 4:  # the shard is a slice of the full copy
        value = 4.0
    else:
        value = state + compute_bytes
    return value + grad + ADAM_MOMENTS * state


def passes_of(stage: Stage, num_micro_batches: int) -> int:
    reductions = num_micro_batches if stage.reduce_every == "micro_batch" else 1
    if not stage.shards_state:
        return 2 * reductions  # the mean is gathered too: together an all-reduce
    uses = (stage.frees_after_forward + stage.frees_after_backward) * num_micro_batches
    return reductions + (uses or 1)  # a copy that is kept is gathered once, after the step


def test_the_table_of_costs_follows_from_the_table_of_stages():
    table = table_of_costs()
    assert sorted(table) == [stage.number for stage in STAGES]
    for stage in STAGES:
        fp32, bf16, passes = table[stage.number]
        for num_ranks in (2, 8, 1024):
            for num_micro_batches in (1, 4):
                sizes = num_ranks, num_micro_batches
                assert value_of(fp32, *sizes) == pytest.approx(bytes_of(stage, 4, num_ranks))
                assert value_of(bf16, *sizes) == pytest.approx(bytes_of(stage, 2, num_ranks))
                assert value_of(passes, *sizes) == passes_of(stage, num_micro_batches)


def losses_in(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", out, re.MULTILINE)]


@pytest.mark.slow
def test_the_program_of_the_readme_runs_and_learns(tmp_path):
    (program,) = [code for code in code_blocks(ROOT / "README.md", "python") if "init_" in code]
    (tmp_path / "program.py").write_text(program)
    done = programs.run_program(tmp_path / "program.py", num_ranks=2, cwd=tmp_path)
    losses = re.findall(r"loss ([\d.]+)", done.stdout)
    assert len(losses) == 1 and float(losses[0]) < 0.6  # rank 0 prints


def plans_on(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each `shardwise plan` of a page, with the lines that the page says it prints."""
    blocks = FENCE.findall(page.read_text())
    for (kind, command), (printed_as, printed) in pairwise(blocks):
        if kind == "sh" and command.startswith("shardwise plan") and printed_as == "text":
            arguments = command.removeprefix("shardwise plan").replace("\\\n", "")
            yield arguments.strip(), printed.splitlines()


CHOOSE = ROOT / "docs" / "choose.md"


@pytest.mark.parametrize(("arguments", "lines"), list(plans_on(CHOOSE)))
def test_plans_print_what_the_page_on_choices_says(arguments, lines, tmp_path, monkeypatch, capsys):
    (config,) = code_blocks(CHOOSE, "json")
    (tmp_path / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    code = call_command("plan", arguments.split())
    printed = capsys.readouterr().out
    assert not [line for line in lines if line.rstrip() not in printed]
    assert code == lines[0].startswith("will not fit")


@pytest.mark.slow
def test_the_first_program_runs_on_two_ranks_and_its_run_is_drawn(tmp_path):
    page = ROOT / "docs" / "start.md"
    (program,) = code_blocks(page, "python")
    (tmp_path / "first.py").write_text(program)
    done = programs.run_program(tmp_path / "first.py", num_ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (printed,) = code_blocks(page, "text")
    assert printed in done.stdout
    for command in ("report", "doctor"):
        assert call_command(command, [str(tmp_path / "runs" / "first")]) == 0
    assert (tmp_path / "runs" / "first" / "report.html").exists()


def test_the_site_finds_the_colours_of_report_pages():
    light, dark = colours()
    assert light.keys() == dark.keys() and not set(light.items()) & set(dark.items())


def test_the_version_is_the_same_in_each_file():
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    package, labs = (
        re.search(r'^version = "(.+)"$', (folder / "pyproject.toml").read_text(), re.M)
        for folder in (ROOT, ROOT / "labs")
    )
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert {m and m[1] for m in (citation, package, labs, newest)} == {shardwise.__version__}


def test_the_workflow_calls_targets_of_make_on_the_versions_that_the_pages_promise():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split()[:2] for step in steps if "run" in step]
    assert {make for make, _ in commands} == {"make"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for _, target in commands)
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {row["python"] for row in rows if row["torch"] == pinned[1]} == {"3.11", "3.12", "3.13"}
    promise = (ROOT / "docs" / "contributing.md").read_text()
    oldest = re.search(r"torch: (\d+\.\d+) and newer", promise)
    assert min(rows, key=lambda row: row["torch"])["torch"].startswith(f"{oldest[1]}.")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1000


@pytest.mark.slow
def test_the_loop_of_the_readme_learns_under_torchrun_at_another_stage():
    out = programs.torchrun("examples/train_loop.py", "--stage", 1)
    first, *_, last = losses_in(out)
    assert last < first / 2 and "stage 1 over 2 ranks" in out


@pytest.mark.slow
def test_a_loop_goes_on_by_itself_when_ranks_die_and_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    quiet = programs.run_example("restart.py", "--folder", tmp_path / "quiet")
    died = programs.torchrun(
        *("--max-restarts", 3, "examples/restart.py", "--folder", tmp_path / "died"),
        *("--die-after", 7, 13),
    )
    steps = re.compile(r"^step (\d+): loss \S+ (\S+)$", re.MULTILINE)
    assert len(steps.findall(quiet)) == 20 < len(steps.findall(died))
    assert set(steps.findall(died)) == set(steps.findall(quiet))
    # Where a restart goes on depends on how far the copies behind the steps have come.
    words = [set(re.findall(r"^[a-z ]+", text, re.M)) for text in (died, printed_by("restart.py"))]
    assert words[0] == words[1]


@pytest.mark.slow
def test_a_hugging_face_model_is_finetuned_unmodified_and_writes():
    pytest.importorskip("transformers", reason="needs transformers, an extra")
    out = programs.run_as_in_the_gallery("finetune_transformers.py")
    first, *_, last = losses_in(out)
    assert last < first / 2


@pytest.mark.slow
def test_a_generator_gets_the_weights_of_training_ranks():
    out = programs.run_as_in_the_gallery("stream_weights.py", num_ranks=3)
    first, *_, last = (int(right) for right in re.findall(r"steps: (\d+) of 32", out))
    assert first < last > 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "num_ranks"),
    [
        (["train_loop.py", "--stage", "3"], 2),
        (["local_steps.py", "--every", "10"], 2),
        (["shard_and_tensor.py"], 4),
        (["long_context.py", "--method", "heads"], 4),
        (["experts.py"], 4),
        (["pipeline.py"], 8),
    ],
)
def test_sharded_and_composed_models_learn(arguments, num_ranks):
    out = programs.run_as_in_the_gallery(*arguments, num_ranks=num_ranks)
    first, *_, last = losses_in(out)
    assert last < first / 2


def test_offload_on_one_device_changes_no_loss():
    out = programs.run_as_in_the_gallery("offload.py", num_ranks=1)
    assert out.endswith("the same losses: True\n")
    files = programs.run_example("offload.py", "--place", "nvme:.", num_ranks=1)
    assert files.endswith("the same losses: True\n")


def test_a_loop_of_fsdp2_prints_the_same_losses_with_one_import_changed():
    out = programs.run_as_in_the_gallery("from_fsdp2.py")
    assert out == programs.run_example("from_fsdp2.py", "--torch")


def test_every_example_is_short_and_in_the_gallery():
    page = (ROOT / "docs" / "gallery.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"(../examples/{path.name})" in page, path.name
        if path.name != "zero_from_scratch.py":  # a text to read
            assert len(path.read_text().splitlines()) < 80, path.name
