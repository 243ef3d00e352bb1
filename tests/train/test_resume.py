"""Runs that died resume bit for bit on real ranks; errors reach all ranks."""

import errno
import os
import re
import signal
import time

import pytest
import torch

from programs import run_program, start_program
from ranks import HANG_S, run_ranks
from resumes import (
    TINY,
    CountsSteps,
    curve_of,
    decoder_roundings,
    lines_of,
    moments_of,
    prepared,
    train,
    train_and_die,
    write_text,
)
from roundings import (
    SHARP,
    SMOOTH_EPS,
    assert_all_rounded_alike,
    assert_rounded_alike,
)
from shardwise.checkpoint import checkpoints
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.memory import COPY, ROOT, folder_in_memory
from shardwise.errors import CheckpointError
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.launch import StopRequest
from shardwise.train.loop import train_prepared
from shardwise.train.saves import RunCheckpoints
from shardwise.train.summary import format_result

STEPS = 7
PARTS = ["imports", "process group", "rebuild", "load", "first step"]
# Every stage, precision, layout, 1 to 3 ranks; with and without accumulation, checkpointing, ties.
SETTINGS = [
    (1, {"stage": 0, "precision": "fp32", "layout": "rows", "accumulation": 2, "grad_clip": 0}),
    (1, {"stage": 3, "precision": "fp16", "layout": "flat", "activation_checkpointing": True}),
    (2, {"stage": 0, "precision": "bf16", "layout": "rows", "save_in_background": False}),
    (2, {"stage": 3, "precision": "bf16", "optimizer_options": {"moments": "bf16"}}),
    (
        3,
        {"stage": 1, "precision": "fp16", "layout": "rows", "accumulation": 2}
        | {"optimizer_options": {"moments": "8bit", "block": 64}},
    ),
    (
        3,
        {"stage": 2, "precision": "fp32", "layout": "flat", "reduce_every": "step"}
        | {"tied_head": True, "activation_checkpointing": True},
    ),
    (3, {"stage": 3, "precision": "bf16", "gather": "int4", "gather_block": 32}),
    (
        2,
        {"stage": 1, "precision": "bf16", "dp_replicate": 2}
        | {"local_steps": {"every": 3, "state": "int8", "streams": 2}},
    ),
    (1, {"precision": "fp32", "optimizer": "sgd", "warmup_steps": 0, "schedule": "WarmupLR"}),
    (
        2,
        {"precision": "fp32", "optimizer": "radam", "optimizer_options": {"eps": 1e-5}}
        | {"schedule": "WarmupCosineLR", "warmup_steps": 0}
        | {"schedule_options": {"cos_min_ratio": 0.1}},
    ),
]


def straight_and_died(rank, world_size, folder, flags, die_in, save_every):
    """Train without an end, then the same in two parts; only one of them evaluates often."""
    flags = {"steps": STEPS, "dropout": 0.1, "warmup_steps": 2, **flags}
    train(rank, world_size, {**flags, "output": folder / "straight", "eval_every": 2})
    saving = {"output": folder / "parts", "save_every": save_every, "resume": "auto"}
    train_and_die(rank, world_size, {**flags, **saving}, die_in)
    said = []
    result = train(rank, world_size, {**flags, **saving}, said=said)
    done = (die_in - 1) // save_every * save_every
    assert [line.split(" (")[0] for line in said[:1]] == [f"going on from step {done}"] * (done > 0)
    if rank == 0 and done:  # the verdict on the run before
        lost = die_in - 1 - done
        again = f"{lost} of its steps are taken again" if lost else "none of its steps is lost"
        assert said[-2].startswith("the run before: ") and said[-2].endswith(again)
        assert re.search(r"first step [\d.e-]+$", said[-1])
    assert len(result.losses) == STEPS - done


@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_a_run_that_died_goes_on_to_the_same_bits(tmp_path, case):
    world_size, flags = SETTINGS[case]
    flags = {**flags, "data": write_text(tmp_path)}
    die_in, save_every = [(4, 1), (6, 2), (2, 1), (5, 3)][case % 4]
    run_ranks(straight_and_died, world_size, tmp_path, flags, die_in, save_every)
    straight = curve_of(tmp_path / "straight")
    assert [step for step, _, _ in straight] == list(range(1, STEPS + 1))
    assert curve_of(tmp_path / "parts") == straight
    ends = [lines_of(tmp_path / name) for name in ("straight", "parts")]
    evals = [[line["eval_loss"] for line in lines if "eval_loss" in line][-1] for lines in ends]
    assert evals[0] == evals[1]
    if flags["precision"] == "fp16":
        norms = [line["grad_norm"] for line in ends[0] if "loss" in line]
        assert None in norms and set(norms) != {None}, "steps were to be skipped, but not all"


def train_and_say(rank, world_size, flags):
    said = []
    train(rank, world_size, flags, said=said)
    return said


DECODER_ROUNDINGS = decoder_roundings(load_config(None, TINY), rows=12)
SMOOTH = {"steps": STEPS, "global_batch": 12, "optimizer_options": {"eps": SMOOTH_EPS}}
SAVES_ALL = {"save_every": 1, "resume": "auto"}


def assert_same_steps(one, other, last=STEPS):
    """Check that two runs have the same losses and gradients but for their roundings."""
    losses = [[line["loss"] for line in lines_of(x) if "loss" in line][:last] for x in (one, other)]
    assert len(losses[0]) == len(losses[1]) == last
    for step, (ours, theirs) in enumerate(zip(*losses, strict=True), 1):
        assert_rounded_alike(ours, theirs, DECODER_ROUNDINGS, f"losses of step {step}")
        moments = moments_of(one, step), moments_of(other, step)
        assert_all_rounded_alike(*moments, DECODER_ROUNDINGS)


@pytest.mark.kernels
def test_a_run_goes_on_over_other_ranks_and_another_stage(tmp_path):
    """Six micro-batches over four ranks: two of the eight passes have no micro-batch."""
    shape = {"data": write_text(tmp_path), **SMOOTH, **SAVES_ALL, "dropout": 0.1}
    alone = {**shape, "output": tmp_path / "alone"}
    run_ranks(train_and_die, 1, alone, 4)
    run_ranks(train, 1, {**alone, "weight_decay": 0.2})
    parts = {**shape, "output": tmp_path / "parts"}
    run_ranks(train_and_die, 2, {**parts, "stage": 3, "layout": "flat"}, 4)
    more = {"stage": 1, "weight_decay": 0.2, "global_batch": None}
    said, *_ = run_ranks(train_and_say, 4, {**parts, **more})
    assert_same_steps(tmp_path / "parts", tmp_path / "alone")
    text = "\n".join(said)
    for part in ("ranks: 2 -> 4", "stage: 3 -> 1", "weight_decay: 0.1 -> 0.2"):
        assert part in text
    assert "global_batch" not in text and "dim" not in text


def train_wrongly(rank, world_size, flags):
    """Train with the gradient of one parameter, a small one, wrong by 1e-4."""
    run = prepared(rank, world_size, flags)
    wrong = dict(run.model.named_parameters())["blocks.1.attention_norm.weight"]

    def spoil(*_):
        wrong.grad.mul_(1 + SHARP)

    run.optimizer.register_step_pre_hook(spoil)
    train_prepared(run, StopRequest())


@pytest.mark.kernels
def test_a_gradient_that_is_wrong_by_1e_4_does_not_pass_for_a_rounding(tmp_path):
    shape = {"data": write_text(tmp_path), **SMOOTH, **SAVES_ALL, "steps": 2}
    run_ranks(train, 1, {**shape, "output": tmp_path / "alone"})
    for train_it, name in ((train, "right"), (train_wrongly, "wrong")):
        run_ranks(train_it, 2, {**shape, "output": tmp_path / name})
    assert_same_steps(tmp_path / "right", tmp_path / "alone", last=2)
    with pytest.raises(AssertionError, match=r"blocks\.1\.attention_norm\.weight differ"):
        assert_same_steps(tmp_path / "wrong", tmp_path / "alone", last=2)


def change_settings(rank, world_size, flags):
    """Go on with another decay, which must be the new one; the checkpoint has the old one."""
    run = prepared(rank, world_size, {**flags, "weight_decay": 0.25, "beta1": 0.5})
    with RunCheckpoints(run) as saves:
        assert saves.resume(lambda line: None) is not None
    group = run.optimizer.param_groups[0]
    return [group["weight_decay"], *group["betas"]]


def test_settings_of_the_optimizer_are_those_asked_for_now(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 1}
    flags |= {"save_every": 1, "resume": "auto"}
    run_ranks(train, 1, flags)
    assert run_ranks(change_settings, 1, flags) == [[0.25, 0.5, 0.95]]


def draw_of_step(rank, world_size, flags):
    prepared(rank, world_size, flags).seed_draws(7, 0)
    return torch.rand(4).tolist()


def test_ranks_that_share_a_window_draw_other_masks(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "dropout": 0.1, "tp": 2}
    one, other = run_ranks(draw_of_step, 2, flags)
    assert one != other


def finish_twice(rank, world_size, flags):
    train(rank, world_size, flags)
    result = train(rank, world_size, flags)
    assert (result.steps, result.losses) == (3, [])
    return format_result(result, TrainConfig())


def test_a_run_that_is_done_has_nothing_left_to_do(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 3}
    flags |= {"save_every": 2, "resume": "auto"}
    texts = run_ranks(finish_twice, 2, flags)
    assert all("nothing left to do: step 3 is the last one" in text for text in texts)
    lines = lines_of(tmp_path / "run")
    saves = [line for line in lines if "saved_bytes" in line]
    assert [line["step"] for line in saves] == [2, 3]
    keys = ["save_bytes_per_s", "save_s", "save_stall_s", "save_waited_s", "saved_bytes", "step"]
    assert sorted(saves[0]) == keys
    assert saves[0]["saved_bytes"] == sum(
        path.stat().st_size
        for path in (tmp_path / "run" / "checkpoints" / "step-00000002").iterdir()
        if path.name != "manifest.json"
    )
    (load,) = [line for line in lines if "load_s" in line]
    assert load["step"] == 3 and load["loaded_bytes"] > 0 and load["load_bytes_per_s"] > 0


class NoSpace(Files):
    """A disk that is full from the second checkpoint on, on one rank."""

    def create(self, path):
        if "step-00000002" in str(path):
            time.sleep(0.2)  # so that other ranks are ready to go on
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return super().create(path)


def fail_to_save(rank, world_size, flags):
    counts = CountsSteps()
    checkpoints.Files = NoSpace if rank == 1 else Files
    try:
        train(rank, world_size, flags, counts)
    except CheckpointError as error:
        return str(error), counts.num_steps
    finally:
        checkpoints.Files = Files
    raise AssertionError("the disk was full")


def test_a_save_that_fails_in_the_background_ends_all_ranks_after_one_step(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 500}
    outcomes = run_ranks(fail_to_save, 3, {**flags, "save_every": 1})
    assert len(set(outcomes)) == 1
    text, num_steps = outcomes[0]
    assert re.search(r"rank 1: .*step-00000002.*No space left on device", text)
    assert 2 <= num_steps < 500
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == [".shardwise.lock", "step-00000001"]


def run_beside(rank, world_size, flags):
    path = flags["output"] / "metrics.jsonl"
    with RunCheckpoints(prepared(rank, world_size, flags)):
        before = path.read_bytes()
        with pytest.raises(CheckpointError) as caught:
            train_prepared(prepared(rank, world_size, flags), StopRequest())
        assert path.read_bytes() == before
    return str(caught.value)


def test_a_second_run_on_one_output_is_refused_and_touches_nothing(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "resume": "auto"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    texts = run_ranks(run_beside, 2, flags)
    assert len(set(texts)) == 1
    assert "\n" not in texts[0] and f"process {os.getpid()}" not in texts[0]
    assert "saves checkpoints there; choose another folder, or end that run" in texts[0]


def stop_and_go_on(rank, world_size, flags):
    assert train(rank, world_size, flags, CountsSteps(stop_in=3)).saved_step == 3
    return train_and_say(rank, world_size, flags)


def test_a_run_that_is_stopped_saves_to_disk_where_it_else_copies_to_memory_alone(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 5}
    flags |= {"memory_every": 1, "resume": "auto"}
    said, _ = run_ranks(stop_and_go_on, 2, flags)
    assert said[0].startswith("going on from step 3 (") and "step-00000003" in said[0]


def warning_of_unfinished_copy(memory):
    """Return a pattern of the warning that a copy newer than all whole ones brings, or ""."""
    found = list(filter(None, (COPY.fullmatch(path.name) for path in memory.iterdir())))
    whole = max(int(match[1]) for match in found if match[1])
    newer = [int(match[3]) for match in found if match[2] == "tmp" and int(match[3]) > whole]
    return "".join(
        rf".*UserWarning: the copy of step {step} in memory does not count: it was not complete "
        rf"when the run ended\. step-{whole:08} was loaded from memory\n.*\n"
        for step in newer
    )


@pytest.mark.slow
def test_ranks_and_jobs_that_are_killed_go_on_to_the_same_bits(tmp_path):
    flags = {"data": write_text(tmp_path), "dropout": 0.1, "schedule": "constant"}
    shape = {**TINY, **flags, "output": tmp_path / "parts", "ranks": 2, "restarts": 9}
    shape |= {"memory_every": 2, "resume": "auto"}
    common = [f"--{key.replace('_', '-')}={value}" for key, value in shape.items()]
    path = tmp_path / "parts" / "metrics.jsonl"
    memory = folder_in_memory(tmp_path / "parts" / "checkpoints", ROOT)
    job = start_program(tmp_path, "shardwise", "train", *common, "--steps=100000", launches=True)

    def has_come_to(step):
        has_copy = any(memory.glob("step-*/manifest.json"))
        return has_copy and path.exists() and f'"step": {step},' in path.read_text()

    for step, number in ((6, slice(1)), (12, slice(None)), (18, None)):  # a rank, all, the job
        deadline = time.monotonic() + HANG_S
        while not has_come_to(step):
            assert job.process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        for pid in job.ranks[number] if number is not None else (job.pid, *job.ranks):
            os.kill(pid, signal.SIGKILL)  # ranks have sessions of their own
    assert job.finish()[0] == -signal.SIGKILL
    warned = warning_of_unfinished_copy(memory)
    line = re.compile(r"^going on from step (\d+) \(a copy in memory\)$", re.MULTILINE)
    went_on = line.findall(job.printed()[0])
    assert len(went_on) == 2 and int(went_on[0]) >= 2
    verdicts = re.findall(r"^the run before: (.*)$", job.printed()[0], re.MULTILINE)
    assert len(verdicts) == 2
    # One rank left its error, or its launcher ended it first; of all ranks none left any.
    assert (
        "rank 0 (process" in verdicts[0] or "ranks 0" in verdicts[0] or "rank 0 on" in verdicts[0]
    )
    assert "left no error: each was killed" in verdicts[1]  # no rank was left to look
    restarts = [line["restart"] for line in lines_of(tmp_path / "parts") if "restart" in line]
    assert all(restart["from_memory"] for restart in restarts) and restarts
    for restart in restarts:
        assert [*restart["parts_s"]][-5:] == PARTS and min(restart["parts_s"].values()) >= 0
    reached = max(step for step, _, _ in curve_of(tmp_path / "parts"))
    ended = run_program("shardwise", "train", *common, f"--steps={reached + 4}", num_ranks=2)
    assert ended.returncode == 0, ended.stderr
    done = rf"step {reached + 4} of {reached + 4}: loss \d+\.\d+, .*took \S.*\n"
    # How far it is, and nothing else, unless the kill came while a copy was written.
    assert re.fullmatch(warned + done, ended.stderr), ended.stderr
    assert "changed since then: steps: 100000 ->" in ended.stdout
    assert line.findall(ended.stdout) and not memory.exists()
    flags |= {"output": tmp_path / "straight", "steps": reached + 4}
    run_ranks(train, 2, flags)
    assert curve_of(tmp_path / "parts") == curve_of(tmp_path / "straight")
