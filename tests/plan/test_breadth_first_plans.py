"""Plans of steps whose micro-batches go through each unit before the next; traffic of real runs."""

from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memory_cells import SEQ, Cell, build_decoder, planned
from ranks import run_ranks
from shardwise import accumulate, shard
from shardwise.cli.plan_setup import set_up
from shardwise.debug import stats
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.request import PlanRequest
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Transfer
from test_play import BLOCK, MODEL, SMALL, make_tape

layer_by_layer: Any = partial(accumulate, order="breadth_first")

NUM = 3
CELLS = [
    Cell("decoder", 1, False),
    Cell("decoder", 2, True, "bf16"),
    Cell("decoder", 3, False, "bf16"),
    Cell("decoder", 3, True),
]


def in_rounds(candidate: Candidate, num: int = NUM) -> Candidate:
    return replace(candidate, accumulation=num, accumulation_order="breadth_first")


def measure(rank: int, num_ranks: int) -> list[dict[str, Any]]:
    found = []
    for cell in CELLS:
        model: Any = build_decoder(cell.checkpointed)
        model = shard(model, stage=cell.stage, precision=cell.precision)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):  # the second step is as all that follow
            before = stats(model)
            batches = [torch.zeros((cell.micro_batch, SEQ), dtype=torch.int64) for _ in range(NUM)]
            layer_by_layer(model, lambda ids, m=model: m(ids, ids), batches).backward()  # type: ignore[misc]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after = stats(model)
        sent = Counter(after.sent_bytes) - Counter(before.sent_bytes)
        num = Counter(after.num_collectives) - Counter(before.num_collectives)
        peak = after.param_full_peak_bytes
        found.append({"sent": dict(sent), "num": dict(num), "param_full": peak})
    return found


def test_traffic_and_full_parameters_are_those_of_a_run() -> None:
    for cell, found in zip(CELLS, run_ranks(measure, 2)[0], strict=True):
        candidate = in_rounds(cell.candidate(2))
        played = play(planned("decoder").tape(candidate), candidate)
        assert {k: v for k, v in played.program.sent_bytes.items() if v} == found["sent"], cell
        assert {k: v for k, v in played.program.num_collectives.items() if v} == found["num"], cell
        assert max(m.ledger.param_full for m in played.peaks) == found["param_full"], cell


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_gathered_and_fetched_does_not_grow_with_the_micro_batches(
    precision: str, recomputes: bool
) -> None:
    offload = Offload(params="cpu", optimizer="cpu")
    candidate = replace(SMALL, precision=precision, offload=offload)
    tape = make_tape(MODEL, recomputes=recomputes)
    alone, rounds = play(tape, candidate), play(tape, in_rounds(candidate, 5))
    depth = play(tape, replace(candidate, accumulation=5))

    def fetched(played: Any) -> int:
        works = [op.work for op in played.program.ops if isinstance(op.work, Transfer)]
        return sum(w.num_bytes for w in works)

    assert rounds.program.num_collectives == alone.program.num_collectives
    assert fetched(rounds) == fetched(alone) < fetched(depth)
    gather = "shard.all_gather"
    assert rounds.program.sent_bytes[gather] == alone.program.sent_bytes[gather]
    assert depth.program.sent_bytes[gather] == 5 * alone.program.sent_bytes[gather]


def test_activations_of_all_micro_batches_are_there_at_a_time() -> None:
    """1,000 bytes for each of five units, 500 of the loss; 50 of a block that is recomputed."""
    for recomputes in (False, True):
        tape = make_tape(MODEL, recomputes=recomputes)
        peaks = [
            max(m.ledger.activations for m in play(tape, in_rounds(SMALL, num)).peaks)
            for num in (1, 2, 4)
        ]
        assert peaks == [num * 5500 for num in (1, 2, 4)]
    full = sum(map(prod, BLOCK)) * 4
    for precision in ("fp32", "bf16"):
        candidate = replace(SMALL, precision=precision, bucket_bytes=0)
        played = [play(make_tape(MODEL), in_rounds(candidate, num)) for num in (1, 4)]
        grads = [max(m.ledger.grad_full for m in each.peaks) for each in played]
        assert grads[0] <= grads[1] <= grads[0] + full  # of one micro-batch, and their sum
        assert played[0].resting == played[1].resting


def test_the_key_of_a_run_and_the_flag_decide_the_plan(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("accumulation: 2\naccumulation_order: breadth_first\nvocab: 64\nseq: 64\n")
    setup = set_up(str(run), PlanRequest(ranks=2))
    assert setup.candidate.in_rounds and "x 2 layer by layer" in setup.candidate.label
    flags = PlanRequest(ranks=2, accumulation_order="depth_first")
    assert not set_up(str(run), flags).candidate.in_rounds
    with pytest.raises(ValueError, match="expected depth_first with pp, as pp_schedule"):
        PlanRequest(pp=2, accumulation_order="breadth_first")
