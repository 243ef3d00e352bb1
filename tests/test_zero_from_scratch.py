"""The blocking twin takes the same steps as the plain loop, at every stage and world size."""

from functools import partial
from pathlib import Path

import pytest
import torch

import zero_from_scratch as zero
from models import OddModel
from oracle import assert_same_bits, plain_loop
from programs import run_program
from ranks import on_ranks
from roundings import SHARP, assert_all_rounded_alike, assert_rounded_alike, of_gradient
from trainer import adamw, make_steps, token_batch

STAGES = [0, 1, 2, 3]
EXAMPLE = Path(zero.__file__)


def make_model():
    torch.manual_seed(0)
    return OddModel()


def own_part(steps, rank):
    return [[by_rank[rank] for by_rank in micro_batches] for micro_batches in steps]


def train_twin(rank, steps, stage, optimizer_factory=adamw, max_norm=None, dtype=torch.float32):
    torch.set_default_dtype(torch.float32)  # the weights are drawn in it
    model = make_model().to(dtype)
    torch.set_default_dtype(dtype)  # the twin's buffers have it
    own, loss = own_part(steps, rank), zero.next_byte_loss
    return zero.train(model, list(model.blocks), own, loss, stage, optimizer_factory, max_norm)


def train_plain(steps, factory=adamw, dtype=torch.float32, **options):
    return plain_loop(make_model().to(dtype), steps, zero.next_byte_loss, factory, **options)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@on_ranks(1, 2, 3)
def test_every_stage_has_the_bits_of_the_plain_loop(rank, world_size, num_micro_batches):
    steps = make_steps(world_size, 4, num_micro_batches, token_batch)
    for stage in STAGES:
        truth = train_plain(steps, reduce_each_micro_batch=stage > 1)
        used = {name: p for name, p in truth.parameters.items() if name != "never_used"}
        trained = train_twin(rank, steps, stage)
        assert trained.losses == [losses[rank] for losses in truth.losses]
        assert_same_bits({name: trained.parameters[name] for name in used}, used)


@on_ranks(1, 3)
def test_clipping_differs_by_the_rounding_of_one_norm(rank, world_size):
    """In fp64 by SGD: what a gradient is off by shows in the parameters, and roundings hardly."""
    sgd, dtype = partial(torch.optim.SGD, lr=0.1), torch.float64
    steps = make_steps(world_size, 4, 1, token_batch)
    truth, other = (train_plain(steps, sgd, dtype, clip=c) for c in (0.5, 0.5 * (1 + SHARP)))
    roundings = of_gradient(*(7, 28) * 3, 7, 256, over=world_size * 2 * 8)
    for stage in STAGES:
        found = train_twin(rank, steps, stage, sgd, 0.5, dtype)
        assert_all_rounded_alike(found.parameters, truth.parameters, roundings)
    for name in truth.parameters.keys() - {"never_used"}:
        with pytest.raises(AssertionError, match="roundings make"):
            assert_rounded_alike(other.parameters[name], truth.parameters[name], roundings)


@on_ranks(1, 2, 3, 4)
def test_bytes_held_and_sent_are_those_of_the_formulas(rank, world_size):
    numel = sum(p.numel() for p in zero.TinyModel().parameters())
    steps = own_part(make_steps(world_size, 3, 2, token_batch), rank)
    for stage in STAGES:
        model = zero.TinyModel()
        loss, adam = zero.next_byte_loss, torch.optim.Adam
        trained = zero.train(model, list(model.blocks), steps, loss, stage, adam)
        held = zero.formula_held_bytes(numel, world_size, stage)
        sent = zero.formula_sent_bytes(numel, world_size, stage, 2)
        assert held <= trained.held_bytes <= 1.01 * held
        assert sent <= trained.sent_bytes <= 1.01 * sent


LEAVE_CLEANLY = """
import sys
from pathlib import Path
import torch.distributed as dist
import zero_from_scratch as zero
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
zero.compare_stages(num_steps=1)
dist.destroy_process_group()
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
sys.exit(any("gloo" in name for name in names))
"""


@pytest.mark.slow
def test_no_thread_of_the_process_group_outlives_it(tmp_path):
    """One that does may abort the process when the interpreter ends."""
    (tmp_path / "program.py").write_text(LEAVE_CLEANLY)
    done = run_program(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["alone", "torchrun"])
def test_the_example_prints_the_same_losses_at_every_stage(launch):
    alone = launch == "alone"
    how = {"launches": True} if alone else {"num_ranks": 2}
    done = run_program(EXAMPLE, *(["--ranks", 2] if alone else []), **how)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()][1:]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert len({row[1] for row in rows}) == 1, "the first losses differ"
    assert float(rows[0][2]) < float(rows[0][1]), "nothing was learnt"
