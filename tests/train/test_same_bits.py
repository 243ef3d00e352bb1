"""Ways to run that change no bit: where state rests, when it is stepped, the order of passes."""

import time
from unittest import mock

import pytest

from ranks import on_ranks, run_ranks
from resumes import lines_of, train, write_text
from shardwise.offload import disk
from shardwise.offload.files import System

SAME = ("loss", "grad_norm", "eval_loss")
BYTES = ("state_bytes", "sent_bytes")
SAVING = {"steps": 4, "save_every": 2, "eval_every": 1, "schedule": "constant"}
WINDOW = {"steps": 3, "reduce_every": "step", "accumulation": 3}
LAYERS = {"breadth": {"accumulation_order": "breadth_first"}}
INPUTS_TOO = {"params": "cpu", "optimizer": "cpu", "activations": "cpu"}


def offloaded(flags, offload):
    ways = {"overlap": {"overlap_step": True}, "parts": {"offload": offload, "replay_every": 3}}
    return {**flags, **SAVING}, ways


CASES = [
    offloaded(
        {"precision": "bf16", "accumulation": 2, "activation_checkpointing": True}, INPUTS_TOO
    ),
    offloaded(
        {"stage": 1, "precision": "fp16", "layout": "flat", "tied_head": True},
        {"optimizer": "cpu", "fraction": 0.5},
    ),
    offloaded(
        {"stage": 0, "grad_clip": 0, "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
        "nvme:{folder}",
    ),
    offloaded({"stage": 2, "optimizer_options": {"moments": "8bit"}}, "nvme:{folder}"),
    ({"precision": "bf16", "activation_checkpointing": True, **WINDOW}, LAYERS),
    ({"precision": "fp16", "layout": "flat", "offload": "cpu", **WINDOW}, LAYERS),
    (WINDOW, {**LAYERS, "alone": {"accumulation": 1}}),
    ({"experts": 3, "expert_bias": True, **WINDOW}, LAYERS),
]
COMPOSED = [
    ({"tp": 2, **WINDOW}, LAYERS),
    ({"cp": 2, "activation_checkpointing": True, **WINDOW}, LAYERS),
]


def train_all_ways(rank, world_size, folder, cases):
    """Train each case plainly and in its other ways; "parts" stops in the middle and resumes."""
    for number, (flags, ways) in enumerate(cases):
        for name, more in {"plain": {}, **ways}.items():
            made = {**flags, **more, "data": folder / "text.txt"}
            made["output"] = folder / str(number) / name
            if isinstance(made.get("offload"), str):
                made["offload"] = made["offload"].format(folder=folder)
            if name == "parts":
                train(rank, world_size, {**made, "steps": 2})
            train(rank, world_size, {**made, "resume": "auto" if name == "parts" else "never"})


def figures(output, keys):
    rows = [row for row in lines_of(output) if "step" in row]
    return [(row["step"], key, row[key]) for row in rows for key in keys if key in row]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(1, CASES[::2]), (3, CASES), (2, COMPOSED)],
    ids=["1", "3", "composed"],
)
def test_a_run_has_the_same_bits_in_every_way(world_size, cases, tmp_path):
    write_text(tmp_path)
    run_ranks(train_all_ways, world_size, tmp_path, cases)
    for number, (flags, ways) in enumerate(cases):
        output = tmp_path / str(number)
        plain = figures(output / "plain", SAME)
        assert len({step for step, _, _ in plain}) == flags["steps"] and len(plain) >= 7
        for name in ways.keys() - {"alone"}:
            assert figures(output / name, SAME) == plain, (number, name)
        if "overlap" in ways:
            assert figures(output / "overlap", BYTES) == figures(output / "plain", BYTES)
        if "breadth" in ways:
            held = [figures(output / name, ("state_bytes",)) for name in ("plain", "breadth")]
            assert held[0] == held[1]
        if "alone" in ways:
            # Of float32 without experts: in half precision sums over micro-batches are sent in
            # float32, and routers send for each micro-batch.
            sent = [figures(output / name, ("sent_bytes",)) for name in ("breadth", "alone")]
            assert sent[0] == sent[1]


class WritesLate(System):
    """A disk that takes its time, so that whoever does not wait for a write reads old bytes."""

    def write(self, fd, at, data):
        time.sleep(0.01)
        return super().write(fd, at, data)


@on_ranks(1)
def test_a_step_computed_twice_waits_for_codes_on_their_way_to_a_slow_disk(tmp_path):
    flags = {"stage": 2, "optimizer_options": {"moments": "8bit"}, "steps": 4, "replay_every": 1}
    flags |= {"data": write_text(tmp_path), "output": tmp_path, "offload": f"nvme:{tmp_path}"}
    with mock.patch.object(disk, "System", WritesLate):
        train(0, 1, flags)
    assert len([row for row in lines_of(tmp_path) if "loss" in row]) == 4
