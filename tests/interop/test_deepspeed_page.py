"""The page about DeepSpeed configs: its tables are those of the code; its example runs."""

import re
from pathlib import Path

import pytest

from programs import run_example
from shardwise.interop.foreign_keys import KEYS, REFUSED_OPTIMIZERS
from shardwise.train.curves import CURVES
from shardwise.train.optimizers import OPTIMIZERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "deepspeed.md").read_text()
TABLES = {
    f"`{section.rpartition('.')[2]}`": KEYS[section]
    for section in KEYS
    if not section.startswith(("top", "accelerate", "optimizer", "scheduler"))
} | {"Top level": KEYS["top"]}


@pytest.mark.parametrize("title", TABLES)
def test_a_table_of_the_page_has_every_key_and_the_reason_of_the_code(title: str) -> None:
    table = TABLES[title]
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", section, re.MULTILINE)
    told = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    second_names = {
        n for n in table if n.startswith("stage3_") and n.removeprefix("stage3_") in table
    }
    assert set(told) == set(table) - second_names
    assert {n: t for n, t in told.items() if table[n].run} == {
        n: key.run for n, key in table.items() if key.run and n not in second_names
    }


def test_the_page_names_every_curve_and_optimizer() -> None:
    assert all(name in PAGE for name in CURVES)
    assert all(title in PAGE for title, _ in OPTIMIZERS.values())
    assert {"muon", "lamb", "lion", "muadam", "onebitadam"} <= REFUSED_OPTIMIZERS.keys()


@pytest.mark.slow
def test_the_example_learns_on_two_ranks() -> None:
    out = run_example("deepspeed_loop.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0] / 2
    assert out.count("zero_optimization.stage = 3") == 1
