"""Adapters over a frozen, sharded base: the steps of DDP, the bytes of the formula."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oracle import assert_same_bits
from peft_models import VARIANTS, Stack, loss_of, make_llama
from ranks import run_ranks
from shardwise import describe, shard
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.layout.units import partition_into_units
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeParam, TapeUnit
from shardwise.plan.step.footprint import weigh
from trainer import events_of, full_parameters

peft = pytest.importorskip("peft", reason="peft is in the test extra")
pytest.importorskip("transformers", reason="transformers is in the test extra")

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SETTINGS = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "layout": "flat"}]


def units_of(model):
    return {unit.name: {p.name for p in unit.params} for unit in partition_into_units(model, None)}


@pytest.mark.parametrize("make", [make_llama, lambda: Stack(nn.Identity)])
def test_units_are_found_inside_pefts_wrapping_and_hold_the_adapters(make):
    plain = units_of(make())
    wrapped = units_of(
        peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj", "down"]))
    )
    blocks = {name for name in plain if name.rpartition(".")[2].isdigit()}
    assert len(blocks) >= 2
    assert {f"base_model.model.{name}" for name in blocks} <= wrapped.keys()
    assert all(any("lora_A" in p for p in wrapped[f"base_model.model.{b}"]) for b in blocks)


def train(model, num_steps=3):
    """Train what is trainable on this rank's data; leave the gradients of one more backward."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank drops what it likes
    random = torch.Generator().manual_seed(rank + 1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randint(64, (2, 8), generator=random))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    loss_of(model, torch.randint(64, (2, 8), generator=random)).backward()
    return losses, optimizer


def settings_of(name):
    """Return two settings of each variant, so that each setting meets variants of either sort."""
    number = sorted(VARIANTS).index(name)
    return [SETTINGS[number % len(SETTINGS)], SETTINGS[(number + 3) % len(SETTINGS)]]


def compare_with_ddp(rank, world_size, name, settings):
    plain = VARIANTS[name]()
    losses, _ = train(DistributedDataParallel(plain))
    assert len(set(losses)) == len(losses)
    for setting in settings:
        model = VARIANTS[name]()
        before = {n: (p.dtype, p.requires_grad, p.nbytes) for n, p in model.named_parameters()}
        shard(model, **setting)
        ours, own = train(model)
        assert ours == losses, setting
        assert_same_bits(full_parameters(model), dict(plain.named_parameters()))
        now = {n: (p.dtype, p.requires_grad) for n, p in model.named_parameters()}
        assert now == {n: facts[:2] for n, facts in before.items()}
        check_bytes(model, own, before, world_size if setting["stage"] else 1)
        check_plan(model, own, setting, world_size)
        check_traffic(model, own, world_size)


def check_bytes(model, optimizer, before, parts):
    """Shards are everything / N; gradients and state are the adapters' / N, and nothing else."""
    total = sum(nbytes for _, _, nbytes in before.values())
    trained = sum(nbytes for _, requires_grad, nbytes in before.values() if requires_grad)
    assert 0 < trained < total
    assert describe(model).full_bytes == total
    assert describe(model).rank_bytes == stats(model).param_shard_bytes == total // parts
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert stats(model).grad_shard_bytes == trained // parts
    memory = {s.data_ptr(): s.nbytes() for s in (g.to_local().untyped_storage() for g in grads)}
    assert sum(memory.values()) == trained // parts
    state = [t.to_local() for s in optimizer.state.values() for t in s.values() if t.dim()]
    assert sum(t.nbytes for t in state) == 2 * trained // parts  # Adam's two moments


def check_plan(model, optimizer, setting, world_size):
    """The planner weighs the same units."""
    candidate = Candidate(
        num_shards=world_size, precision="fp32", transport="point_to_point", **setting
    )
    units = [
        TapeUnit(
            unit.name,
            tuple(
                TapeParam(s.name, s.cut.shape, str(s.sharded.dtype)[6:], s.sharded.requires_grad)
                for s in unit.params
            ),
        )
        for unit in engine_of(model).units
    ]
    weighed = weigh(units, candidate)
    assert sum(w.shard_bytes for w in weighed) == stats(model).param_shard_bytes
    assert sum(w.reduce.out for w in weighed if w.reduce) == stats(model).grad_shard_bytes
    state = [t for s in optimizer.state.values() for t in s.values()]
    held = sum((t.to_local() if t.dim() else t).nbytes for t in state)
    assert sum(w.state_bytes for w in weighed) == held


def check_traffic(model, optimizer, world_size):
    """After a step, stages 1 and 2 gather what was trained and nothing else."""
    stage = engine_of(model).config.stage
    optimizer.step()
    events = events_of(model)
    loss_of(model, torch.zeros(2, 8, dtype=torch.int64))
    gathered = sum(num_bytes for kind, _, num_bytes in events if kind == "shard.all_gather")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if not stage.frees_after_forward:  # stage 3 gathers every unit that runs
        assert gathered == (trained if stage.shards_state else 0) * (world_size - 1) // world_size


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_adapters_take_the_steps_of_ddp_and_the_frozen_base_costs_its_shards_only(name):
    run_ranks(compare_with_ddp, 2, name, settings_of(name))
