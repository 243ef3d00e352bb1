"""The ZeRO formulas, held against published tables and each other.

Runs are held against played steps (test_play_ranks.py), and those against these (test_play.py).
"""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from decimal import Decimal
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import shardwise
from shardwise.cli.plan import accounting_view
from shardwise.errors import ConfigError
from shardwise.plan.accounting import (
    MAX_PARAMS,
    Accounting,
    account,
    accounting_facts,
)
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS
from shardwise.quantities import parse_count

GB = 10**9


def largest_model(memory: int | str, setup: Accounting) -> int:
    """The most parameters whose state fits: ZeRO (arXiv 1910.02054), Table 2."""
    low, high = 0, MAX_PARAMS + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = replace(setup, params=middle).device_bytes <= parse_count(memory)
        low, high = (middle, high) if fits else (low, middle)
    return low


# -- published tables

# Table 1: ranks, then stages 1 to 3 of 7.5B, 128B and 1T parameters, as printed.
TABLE_1 = """
1    120  120  120   2048 2048 2048  16000 16000 16000
4    52.5 41.3 30    896  704  512   7000  5500  4000
16   35.6 21.6 7.5   608  368  128   4750  2875  1000
64   31.4 16.6 1.88  536  284  32    4187  2218  250
256  30.4 15.4 0.47  518  263  8     4046  2054  62.5
1024 30.1 15.1 0.12  513  257  2     4011  2013  15.6
"""

# Table 2, theory: model parallel degree, then the largest model of stages 0 to 3 as printed.
TABLE_2 = """
1  2B  7.6B   14.4B  128B
2  4B  15.2B  28.8B  256B
4  8B  30.4B  57.6B  0.5T
8  16B 60.8B  115.2B 1T
16 32B 121.6B 230.4B 2T
"""


def agrees(printed: str, value: float) -> bool:
    """Tell whether a value, rounded or cut off to the printed digits, is what was printed."""
    scale = 10 ** len(printed.partition(".")[2])
    wanted = round(float(printed) * scale)
    return wanted in (floor(value * scale), round(value * scale), floor(value * scale + 0.5))


def cells_of_table_1() -> Iterator[tuple[int, int, str, str]]:
    for row in TABLE_1.split("\n")[1:-1]:
        ranks, *cells = row.split()
        for number, printed in enumerate(cells):
            yield int(ranks), number % 3 + 1, ("7.5B", "128B", "1T")[number // 3], printed


def test_every_cell_of_table_1_of_the_zero_paper_is_reproduced():
    cells = list(cells_of_table_1())
    assert len(cells) == 54
    for ranks, stage, params, printed in cells:
        found = account(params, ranks, stage, "zero_paper").device_bytes
        assert agrees(printed, found / GB), (ranks, stage, params, printed, found)


def test_every_theoretical_cell_of_table_2_of_the_zero_paper_is_reproduced():
    for row in TABLE_2.split("\n")[1:-1]:
        degree, *cells = row.split()
        for stage, printed in enumerate(cells):
            setup = Accounting(1, ranks=64, stage=stage, precision="zero_paper")
            number, unit = float(printed[:-1]), {"B": 1e9, "T": 1e12}[printed[-1]]
            # Cells below the first row are the first row's as printed, times the degree.
            found = largest_model("32e9", setup) * int(degree) / unit
            assert found == pytest.approx(number, rel=0.025), (row, stage)
            if degree == "1":
                assert agrees(printed[:-1], found)


@pytest.mark.parametrize(
    ("precision", "optimizer", "replicated", "fixed", "sharded"),
    [
        ("megatron_fp16", "adamw", 20, 4, 16),
        ("megatron_bf16", "adamw", 18, 6, 12),
        ("fp32", "adamw", 16, 8, 8),
        ("megatron_bf16", "adamw_bf16_moments", 14, 6, 8),
    ],
)
def test_the_table_of_megatrons_distributed_optimizer_is_reproduced(
    precision, optimizer, replicated, fixed, sharded
):
    params = 840 * GB
    for ranks in (1, 2, 7, 8, 1000):
        whole = account(params, ranks, 0, precision, optimizer).device_bytes
        cut = account(params, ranks, 1, precision, optimizer).device_bytes
        assert whole == replicated * params
        assert cut == (fixed + Fraction(sharded, ranks)) * params


@pytest.mark.parametrize(("ranks", "batches"), [(1, 1), (2, 1), (8, 1), (8, 4), (1024, 3)])
def test_traffic_is_that_of_the_published_formulas(ranks, batches):
    psi = 1024 * 10**6
    once = psi * (ranks - 1) // ranks
    expected = {
        (0, None): 2,
        (1, None): 2,
        (2, None): batches + 1,
        (3, None): 3 * batches,
        (2, "step"): 2,
        (3, "step"): 2 * batches + 1,
    }
    for (stage, every), times in expected.items():
        setup = Accounting(psi, ranks, stage, accumulation=batches, reduce_every=every)  # type: ignore[arg-type]
        assert setup.traffic.shard_sent_elements == times * once


def test_between_copies_a_rank_sends_what_the_fsdp_paper_says():
    model = 840 * 10**6
    for world, group in ((16, 8), (64, 8), (56, 7), (8, 8)):
        traffic = account(model, group, 3, replicas=world // group).traffic
        assert traffic.replica_sent_elements == Fraction(2 * model * (world // group - 1), world)
        assert traffic.replica_sent_bytes == 4 * traffic.replica_sent_elements


# -- properties

names = st.sampled_from(sorted(PRECISIONS))
optimizers = st.sampled_from(sorted(OPTIMIZERS))
counts = st.integers(1, 10**15)


@st.composite
def setups(draw: st.DrawFn) -> Accounting:
    stage = draw(st.integers(0, 3))
    every: Literal["step", "micro_batch"] | None = draw(
        st.sampled_from([None, "step", "micro_batch"])
    )
    return Accounting(
        params=1,
        ranks=draw(st.integers(1, 3000)),
        stage=stage,
        replicas=draw(st.integers(1, 3000)),
        precision=draw(names),
        optimizer=draw(optimizers),
        accumulation=draw(st.integers(1, 100)),
        reduce_every=every,
    )


@given(counts, setups())
def test_the_lines_add_up_and_nothing_is_negative(params, setup):
    found = replace(setup, params=params)
    assert (
        found.device_bytes
        == sum(found.lines.values())
        == found.between_steps + found.lines["gradients"]
    )
    assert min(found.lines.values()) >= 0
    assert all(v >= 0 for v in asdict(found.traffic).values())


@given(counts, names.filter(lambda n: not PRECISIONS[n].has_master), optimizers)
def test_on_one_rank_all_stages_hold_the_same_without_master_weights(params, precision, optimizer):
    held = {account(params, 1, stage, precision, optimizer).device_bytes for stage in range(4)}
    assert len(held) == 1


@given(counts, setups(), st.integers(1, 3000), st.integers(1, 10**15))
def test_every_change_moves_the_bytes_the_way_that_it_must(params, setup, ranks, more):
    """More ranks and a higher stage hold no more, more parameters no less."""

    def held(count: int = params, **changed: Any) -> int:
        return replace(setup, params=count, **changed).device_bytes

    here, fewer = held(), held(ranks=setup.ranks + ranks, replicas=1)
    assert fewer <= here <= held(params + more)
    stages = [held(stage=stage, reduce_every=None) for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    whole = held(stage=3, reduce_every=None, ranks=1)
    assert whole <= stages[3] * setup.ranks  # all ranks together have all of the state


# -- counts and refusals


@given(st.integers(1, 10**18))
def test_a_count_is_read_exactly_in_every_notation(number):
    short = Decimal(number).normalize()
    assert parse_count(number) == parse_count(str(number)) == parse_count(f"{number:_}") == number
    assert parse_count(f"{short:e}") == parse_count(f" {short:E} ") == number
    for suffix, exponent in (("k", 3), ("M", 6), ("b", 9), ("G", 9), ("T", 12)):
        scaled = f"{Decimal(number).scaleb(-exponent):f}"
        assert parse_count(f"{scaled}{suffix}") == parse_count(f"{scaled} {suffix}") == number


NO_COUNTS = ["", "B", "seven", "7.5", "1e-3", "1e999999999", "nan", "inf", "7Q", "1.-3k", "1._5k"]


@pytest.mark.parametrize("text", [*NO_COUNTS, "9" * 5000, "7,5B", float("inf"), 7.5, True, None])
def test_what_is_no_whole_number_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"^tokens=.*expected a whole number, such as 7e9"):
        parse_count(text, "tokens")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": 0}, "params=0: expected 1 to 1,000,000,000,000,000,000"),
        ({"params": -5}, "params=-5: "),
        ({"params": "2e18"}, "params=2000000000000000000: "),
        ({"params": 10**5000}, "params=a number beyond 1e30: "),
        ({"params": float("nan")}, "params=nan: "),
        ({"ranks": 0}, "ranks=0: expected 1 to 10,000,000"),
        ({"ranks": 10**7 + 1}, "ranks=10000001: "),
        ({"ranks": 10**4, "replicas": 10**4}, "ranks x replicas=100000000: "),
        ({"ranks": 8.0}, "ranks=8.0: expected a whole number"),
        ({"replicas": -1}, "replicas=-1: "),
        ({"accumulation": 0}, "accumulation=0: "),
        ({"stage": 4}, "stage=4: expected 0, 1, 2 or 3"),
        ({"stage": True}, "stage=True: "),
        ({"stage": 2.0}, "stage=2.0: "),
        ({"precision": "bf61"}, "precision='bf61': .*did you mean 'bf16'"),
        ({"optimizer": "adam_w"}, "optimizer='adam_w': .*did you mean 'adamw'"),
        ({"reduce_every": "never"}, "reduce_every='never': "),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(changed, message):
    with pytest.raises(ConfigError, match=message):
        account(**{"params": GB, "ranks": 8, **changed})


# -- what is left out, and how it is shown


def test_what_is_left_out_is_said():
    said = " ".join(account(GB, 8, 3).left_out)
    assert "Activations" in said and "gathered" in said and "step counter" in said
    assert "engine does not run it" not in said
    said = " ".join(account(GB, 8, 1, "zero_paper", "muon").left_out)
    assert "Muon updates matrices" in said and "engine does not run it" in said
    assert "counted in full" in said
    assert "counted in full" not in " ".join(account(GB, 8, 1, accumulation=2).left_out)


def test_the_table_marks_the_chosen_stage_and_fits_a_terminal():
    file = io.StringIO()
    console = Console(file=file, width=80, highlight=False)
    console.print(accounting_view(account("7e9", 8, 2, "fp32")))
    text = file.getvalue()
    marked = [line.split() for line in text.splitlines() if ">" in line]
    assert [row[:2] for row in marked] == [[">", "2"]]
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "35.9 GiB" in " ".join(marked[0])  # 38.5 GB
    assert "7,000,000,000 parameters, 8 ranks, fp32, adamw" in text and "left out" in text


def units_of(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        for name, value in data.items():
            yield from units_of(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from units_of(value, key)
    else:
        yield key, data


def test_the_json_has_all_stages_and_a_unit_in_every_key():
    chosen = account("7e9", 8, 3, "fp32")
    data = json.loads(json.dumps(accounting_facts(chosen)))
    assert not any(isinstance(value, float) for _, value in units_of(data))
    inputs = {f.name for f in fields(Accounting)} | {"world_size"}
    for key, value in units_of(data):
        if isinstance(value, int) and key not in inputs:
            assert key.endswith(("_bytes", "_elements")) or key[:4] == "num_"
    assert [row["stage"] for row in data["stages"]] == [0, 1, 2, 3]
    for row in data["stages"]:
        expected = replace(chosen, stage=row["stage"])
        assert row["total_device_bytes"] == expected.device_bytes
        assert row["gradients_device_bytes"] == expected.lines["gradients"]
    assert data["left_out"] == list(chosen.left_out)


IMPORTS = """
import sys; sys.path.insert(0, {!r})
from shardwise.plan.accounting import account; account("7B", 8)
assert not {{"torch", "numpy", "pydantic", "rich", "difflib"}} & {{*sys.modules}}
from shardwise.cli.main import app; app("plan --params 7B".split(), standalone_mode=False)
assert not {{"torch", "numpy", "transformers"}} & {{*sys.modules}}
import shardwise.plan.planning, shardwise.plan.machine.pricing
from shardwise.plan.timing import simulate, goodput, timeline
assert "torch" not in sys.modules
"""


def test_plans_by_formulas_need_no_torch_and_an_accounting_no_numpy():
    code = IMPORTS.format(str(Path(shardwise.__file__).parent.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bytes_of_a_shard_are_rounded_up():
    found = account(10, 3, 3, "fp32")
    assert found.lines["parameters"] == 4 * DTYPE_BYTES["float32"]
