"""The page about DeepSpeed configs: its tables are those of the code; its example runs."""

import re
from pathlib import Path

import pytest

from programs import run_example
from shardwise.interop.deepspeed.optimizers import REFUSED
from shardwise.interop.foreign_keys import (
    ACTIVATION_CHECKPOINTING,
    BF16,
    DATA_TYPES,
    DEEPSPEED,
    FP16,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    TORCH_AUTOCAST,
    ZERO,
    Key,
)
from shardwise.train.curves import CURVES
from shardwise.train.optimizers import OPTIMIZERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "deepspeed.md").read_text()
TABLES: dict[str, dict[str, Key]] = {
    "Top level": DEEPSPEED,
    "`zero_optimization`": ZERO,
    "`offload_param`": OFFLOAD_PARAM,
    "`offload_optimizer`": OFFLOAD_OPTIMIZER,
    "`fp16`": FP16,
    "`bf16`": BF16,
    "`activation_checkpointing`": ACTIVATION_CHECKPOINTING,
    "`data_types`": DATA_TYPES,
    "`torch_autocast`": TORCH_AUTOCAST,
}


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
    assert {"muon", "lamb", "lion", "muadam", "onebitadam"} <= REFUSED.keys()


@pytest.mark.slow
def test_the_example_learns_on_two_ranks() -> None:
    out = run_example("deepspeed_loop.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0] / 2
    assert out.count("zero_optimization.stage = 3") == 1
