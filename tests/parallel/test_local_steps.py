"""Replicas that step separately equal a plain program with two loops, in bits and bytes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from local_loops import CodedLoops, TwoLoops
from models import Stack
from oracle import assert_same_bits
from ranks import agreed, on_ranks, run_ranks
from shardwise import accumulate, fully_shard, shard
from shardwise.check.compare_ranks import check_replicas
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, ReplicaError, StateError
from shardwise.parallel import LocalSteps, Outer, mean_loss
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder
from shardwise.train.setup import make_local_steps, shard_decoder
from trainer import (
    adamw,
    backward_all,
    full_parameters,
    full_state,
    make_steps,
    mean_square,
    reduces_each_micro_batch,
    sharded_by_block,
)

NESTEROV = Outer(lr=0.7, momentum=0.9)


def mesh_of(world_size, replicas):
    return init_device_mesh(
        "cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard")
    )


def build(world_size, replicas, **options):
    torch.manual_seed(0)
    return shard(Stack(), mesh=mesh_of(world_size, replicas), **options)


def check(rank, world_size, replicas, model, micro_batches=1, num_steps=5, each=False, **how):
    """Train beside the two loops; compare this rank's replica after every step."""
    torch.manual_seed(0)
    truth = TwoLoops(Stack(), replicas, adamw, **how)
    optimizer = adamw(list(model.parameters()))
    local = LocalSteps(model, **{"outer": "average", **how})
    replica = rank // (world_size // replicas)
    for number, batches in enumerate(make_steps(world_size, num_steps, micro_batches), 1):
        backward_all(model, batches, mean_square, rank)
        optimizer.step()
        optimizer.zero_grad()
        local.step()
        truth.step(batches, mean_square, reduce_each_micro_batch=each)
        expected = {n: p.detach() for n, p in truth.models[replica].named_parameters()}
        assert_same_bits(full_parameters(model), expected)
        assert local.is_synchronized is (number % how["every"] == 0 and how.get("streams", 1) == 1)
    state = full_state(truth.models[replica], truth.optimizers[replica])
    ours = full_state(model, optimizer)
    for name in state:
        assert_same_bits(ours[name], state[name])
    return local


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 2), (3, 3), (4, 2)])
@on_ranks()
def test_every_stage_equals_a_program_of_two_loops(rank, world_size, replicas):
    nesterov = {"outer": NESTEROV}
    for options, outer in (
        ({"stage": 0}, nesterov),
        ({"stage": 1}, {}),
        ({"stage": 2}, nesterov),
        ({"stage": 3, "layout": "flat"}, nesterov),
        ({"stage": 3, "layout": "flat"}, {}),
    ):
        model = build(world_size, replicas, **options)
        check(rank, world_size, replicas, model, every=2, num_steps=4, **outer)


@on_ranks(2)
def test_groups_of_units_synchronize_at_their_own_steps(rank):
    for streams, every, outer in ((2, 4, {}), (3, 3, {}), (4, 5, {"outer": NESTEROV})):
        model = build(2, 2, stage=3)
        check(rank, 2, 2, model, every=every, streams=streams, num_steps=7, **outer)


@on_ranks(4)
def test_windows_of_micro_batches_are_reduced_over_shards_alone(rank):
    for options in ({"stage": 1}, {"stage": 2}, {"stage": 3}):
        each = reduces_each_micro_batch(options)
        model = build(4, 2, **options)
        check(rank, 4, 2, model, every=2, outer=NESTEROV, micro_batches=2, each=each)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@on_ranks(2)
def test_offloaded_slices_step_apart(rank, place, tmp_path):
    place = place if place == "cpu" else f"nvme:{tmp_path}"
    for replicas in (1, 2):
        model = build(2, replicas, offload=place)
        check(rank, 2, replicas, model, every=2, outer=NESTEROV)


@on_ranks(4)
def test_a_model_of_fully_shard_steps_apart(rank):
    for stays in (True, False):
        torch.manual_seed(0)
        model = sharded_by_block(
            Stack(), fully_shard, mesh=mesh_of(4, 2), reshard_after_forward=not stays
        )
        check(rank, 4, 2, model, every=2, outer=NESTEROV, each=True)


def numel_sent(numel, ranks, rank):
    """Count what a rank sends to sum and share flat elements: others' shares, and its own."""
    share = -(-numel // ranks)
    mine = max(0, min(share, numel - rank * share))
    return numel - mine + mine * (ranks - 1)


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 2), (3, 3), (4, 2)])
@on_ranks()
def test_bytes_between_replicas_are_those_of_slices_once_in_a_window(rank, world_size, replicas):
    shards = world_size // replicas
    place = rank // shards
    for send, options in (
        ("fp32", {"stage": 3}),
        ("fp32", {"stage": 0}),
        ("int8", {"stage": 2, "layout": "flat"}),
    ):
        model = build(world_size, replicas, **options)
        optimizer = adamw(list(model.parameters()))
        local = LocalSteps(model, every=3, outer=Outer(send=send))
        comm = engine_of(model).comm
        expected = 0
        for unit in engine_of(model).units:
            numel = sum(p.sharded._local_tensor.numel() for p in unit.params)
            if options["stage"] == 0:
                numel = -(-numel // shards)
            if send == "fp32":
                expected += 4 * numel_sent(numel, replicas, place)
            else:
                blocks = -(-numel // (replicas * 256))
                scales = -(-4 * blocks // 16) * 16  # a reduction's messages are aligned
                expected += (replicas - 1) * (2 * 256 * blocks + scales + 4 * blocks)
        for number, batches in enumerate(make_steps(world_size, 6, 1), 1):
            backward_all(model, batches, mean_square, rank)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            sent = [v for k, v in comm.traffic.sent_bytes.items() if k.startswith("replicate.")]
            assert sum(sent) == expected * (number // 3)


@on_ranks(2)
def test_codes_of_messages_and_of_momentum_are_those_of_their_formulas(rank):
    """Compare with blocks encoded number by number, for differences, their mean and momentum."""
    for outer in (Outer(send="int8"), Outer(lr=0.5, momentum=0.0, send="int8")):
        torch.manual_seed(0)
        truth = CodedLoops(Stack(), 2, adamw, every=2, outer=outer)
        model = build(2, 2, stage=2)
        optimizer = adamw(list(model.parameters()))
        local = LocalSteps(model, every=2, outer=outer)
        for batches in make_steps(2, 4, 1):
            backward_all(model, batches, mean_square, rank)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            truth.step(batches, mean_square)
        expected = {n: p.detach() for n, p in truth.models[rank].named_parameters()}
        assert_same_bits(full_parameters(model), expected)


@on_ranks(2)
def test_momentum_in_codes_stays_near_that_in_float32_in_a_quarter_of_its_bytes(rank):
    found = {}
    for state in ("fp32", "int8"):
        model = build(2, 2, stage=3)
        optimizer = adamw(list(model.parameters()))
        local = LocalSteps(model, every=2, outer=Outer(state=state))
        for batches in make_steps(2, 6, 1):
            backward_all(model, batches, mean_square, rank)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        agreed({n: p.tolist() for n, p in full_parameters(model).items()})
        found[state] = full_parameters(model), local.state_bytes
    numels = [sum(p.sharded.numel() for p in u.params) for u in engine_of(model).units]
    blocks = sum(-(-numel // 256) for numel in numels)
    assert found["fp32"][1] == 8 * sum(numels)
    assert found["int8"][1] == 4 * sum(numels) + 260 * blocks
    for name, exact in found["fp32"][0].items():
        near = found["int8"][0][name]
        assert (near - exact).abs().max() < 0.02 * exact.abs().max()


@on_ranks(2)
def test_a_model_without_replicas_and_wrong_settings_are_refused_on_all_ranks(rank):
    model = shard(Stack())
    with pytest.raises(ConfigError, match=r"shardwise.Axes\(dp_replicate=2\)"):
        LocalSteps(model, every=2)
    model = build(2, 2)
    for wrong, said in (
        ({"every": 0}, "every=0"),
        ({"every": 2, "outer": "adam"}, "outer='adam'"),
        ({"every": 2, "streams": 3}, "at most every=2"),
        ({"every": 2 + rank}, "every"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            LocalSteps(model, **wrong)
        agreed(str(error.value))
    for field, value in (("lr", 0), ("momentum", 1.0), ("state", "fp8"), ("send", "bf16")):
        with pytest.raises(ConfigError, match=f"outer.{field}"):
            Outer(**{field: value})
    model(torch.ones(2, 8)).sum().backward()  # refusals have changed nothing
    LocalSteps(model, every=2)
    with pytest.raises(ConfigError, match="has one already"):
        LocalSteps(model, every=2)


@on_ranks(2)
def test_ranks_that_count_other_steps_are_named_in_the_next_synchronization(rank):
    model = build(2, 2)
    optimizer = adamw(list(model.parameters()))
    local = LocalSteps(model, every=3)
    for number in range(1, 4):
        model(torch.ones(2, 8)).sum().backward()
        if rank == 0 or number != 3:
            optimizer.step()
        optimizer.zero_grad()
        if number < 3:
            local.step()
    with pytest.raises(StateError, match="have taken different steps") as error:
        local.step()
    agreed(str(error.value))
    with pytest.raises(StateError, match="not to be used"):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_a_loop_that_never_calls_step_is_told_after_a_window(rank):
    model = build(2, 2)
    optimizer = adamw(list(model.parameters()))
    local = LocalSteps(model, every=3)
    num_begun = 0
    with pytest.raises(StateError, match=r"call it after each optimizer.step\(\)"):
        for _ in range(9):
            num_begun += 1
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert num_begun == 5  # the fourth step is one more than a window has
    local.step()
    model(torch.ones(2, 8)).sum().backward()
    with accumulate(model, last=False):
        model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(StateError, match="accumulation window"):
        local.step()


@on_ranks(4)
def test_copies_are_compared_within_each_replica_alone(rank):
    for stage in (0, 2):
        model = build(4, 2, stage=stage)
        optimizer = adamw(list(model.parameters()))
        local = LocalSteps(model, every=9)
        for batches in make_steps(4, 2, 1):
            backward_all(model, batches, mean_square, rank)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        check_replicas(model, optimizer)
    weight = model.get_parameter("head.weight")
    norms = agreed_rows(weight.full_tensor().norm())
    assert norms[0] == norms[1] != norms[2] == norms[3]
    local.synchronize()
    norms = agreed_rows(weight.full_tensor().norm())
    assert len(set(norms)) == 1 and local.is_synchronized
    model = build(4, 2, stage=0)
    LocalSteps(model, every=9)
    if rank == 3:
        with torch.no_grad():
            model.get_parameter("head.weight").to_local()[0, 0] = 5.0
    with pytest.raises(ReplicaError, match="ranks 2, 3 differ from each other"):
        check_replicas(model)


@on_ranks(4)
def test_a_mean_over_tokens_is_that_of_the_replica(rank):
    model = build(4, 2)
    LocalSteps(model, every=2)
    tokens = rank + 1
    loss = mean_loss(model, torch.tensor(6.0 * tokens), tokens)
    assert loss.item() == pytest.approx(6.0 * tokens * 2 / (3 if rank < 2 else 7))


def agreed_rows(value):
    rows = [torch.zeros(()) for _ in range(4)]
    torch.distributed.all_gather(rows, value.detach().clone())
    return [row.item() for row in rows]


# -- experts on a mesh of their own
MIXED = {
    **{"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "seq": 8, "micro_batch": 2},
    **{"vocab": 64, "precision": "fp32", "experts": 4, "expert_balance": 0.0, "ep": 2},
}


def _train_experts(rank, world_size, replica):
    """Train a decoder with experts on two ranks, or on two replicas of two that step separately."""
    apart = {} if replica is not None else {"dp_replicate": 2, "local_steps": 99}
    config = TrainConfig(**MIXED, **apart)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(config, 64)
    model = shard_decoder(config, config.axes.over(world_size), model)
    local = make_local_steps(config, model)
    optimizer = adamw(list(model.parameters()))
    random = torch.Generator().manual_seed(rank if replica is None else 2 * replica + rank)
    for _ in range(3):
        ids = torch.randint(64, (2, 8), generator=random)
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if local is not None:
            local.step()
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def test_a_replica_with_experts_is_what_it_would_be_alone():
    apart = run_ranks(_train_experts, 4, None)
    for replica in range(2):
        alone = run_ranks(_train_experts, 2, replica)
        for ours, expected in zip(apart[2 * replica :][:2], alone, strict=True):
            assert_same_bits(ours, expected)
