"""One flipped bit in a copy of the training state is found, and its rank and tensor are named."""

import ctypes

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from models import Stack
from ranks import agreed, on_ranks
from shardwise import shard
from shardwise.check.compare_ranks import check_replicas
from shardwise.comm.collective_key import name_ranks
from shardwise.engine.api import engine_of
from shardwise.errors import ReplicaError, StateError
from trainer import SPREAD, adamw, adamw_fused

NAME = "blocks.1.up.weight"
ENDING = "test that rank's machine"


class Noisy(Stack):
    """With a scalar parameter, an integer one, a frozen one and statistics of each rank's own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().mean(0)
        return super().forward(x) * self.scale


def build(rank, num_steps=1, fused=False, **options):
    """Return a model and its optimizer after some steps on this rank's own data."""
    torch.manual_seed(0)
    model = shard(Noisy(), **options)
    optimizer = (adamw_fused if fused else adamw)(model.parameters())
    random = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        model(torch.randn(4, 8, generator=random)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def flip_bit(tensor, element=0, bit=0):
    """Flip one bit in memory, behind torch's back."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    assert tensor.numel() > element
    address = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8


def refusal(model, optimizer):
    """Return the text of the error, which is one of states, alike on all ranks."""
    with pytest.raises(ReplicaError) as error:
        check_replicas(model, optimizer)
    assert isinstance(error.value, StateError)
    return agreed(str(error.value))


@pytest.mark.parametrize(("world_size", "odd"), [(3, 1), (3, 0), (2, 1)])
@on_ranks()
def test_a_flipped_bit_of_replicated_state_is_named_on_every_rank(rank, world_size, odd):
    others = ", ".join(str(r) for r in range(3) if r != odd)
    blame = f"rank {odd} differs from ranks {others}. "
    if world_size == 2:
        blame = "ranks 0, 1 differ from each other, and no majority tells which is right. "
    for options in ({"stage": 0}, {"stage": 0, "layout": "flat", "precision": "bf16"}):
        model, optimizer = build(rank, **options)
        param = model.get_parameter(NAME)
        state = optimizer.state[param]
        places = {f"'{NAME}', value": param, "'counts', value": model.counts}
        places |= {f"'{NAME}', {key}": state[key] for key in ("exp_avg", "step")}
        for place, tensor in places.items():
            if rank == odd:
                flip_bit(tensor)
            said = refusal(model, optimizer)
            assert f"differ: parameter {place}: {blame}" in said and said.endswith(ENDING), said
            if rank == odd:
                flip_bit(tensor)
            check_replicas(model, optimizer)


@on_ranks(3)
def test_a_flipped_bit_of_a_fresh_full_copy_is_named(rank):
    for options in (
        {"stage": 2},
        {"stage": 1, "layout": "flat"},
        {"stage": 2, "precision": "bf16"},
        {"stage": 0, "precision": "bf16"},
    ):
        model, optimizer = build(rank, **options)
        param = next(s for u in engine_of(model).units for s in u.params if s.name == NAME)
        if rank == 2:
            flip_bit(param.full.data, element=5)  # stale: the step has changed the shards
        check_replicas(model, optimizer)
        with torch.no_grad():
            model.eval()(torch.ones(2, 8))  # gathers it again
        check_replicas(model, optimizer)
        if rank == 2:
            flip_bit(param.full.data, element=5, bit=3)
        said = refusal(model, optimizer)
        assert f"differ: parameter '{NAME}', full copy: rank 2 differs from ranks 0, 1. " in said
        with torch.no_grad():
            for param in model.parameters():
                if param.is_floating_point():
                    param.mul_(1)  # stale again: what is stale is nobody's loss
        check_replicas(model, optimizer)


@pytest.mark.parametrize(
    ("num_ranks", "blame"),
    [
        (4, "ranks 1, 3 differ from each other, and no majority"),
        (6, "rank 3 differs from ranks 1, 5. "),
    ],
)
@on_ranks()
def test_a_flipped_bit_of_one_replica_is_named_among_those_with_the_same_slices(
    rank, num_ranks, blame
):
    shape = num_ranks // 2, 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(rank, mesh=mesh, stage=3)
    check_replicas(model, optimizer)
    param = model.get_parameter(NAME)
    state = optimizer.state[param]
    others = name_ranks([r for r in range(num_ranks) if r != 3])
    for key, tensor, wrong in (
        ("value", param, blame),
        ("exp_avg_sq", state["exp_avg_sq"], blame),
        ("step", state["step"], f"rank 3 differs from {others}. "),
    ):
        if rank == 3:
            flip_bit(tensor)
        said = refusal(model, optimizer)
        assert f"differ: parameter '{NAME}', {key}: {wrong}" in said, said
        check_replicas(model) if tensor is not param else None
        if rank == 3:
            flip_bit(tensor)


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 1), (3, 1), (4, 2)])
@on_ranks()
def test_no_rank_is_blamed_in_sound_training(rank, num_ranks, num_replicas):
    mesh = None
    if num_replicas > 1:
        shape = (num_replicas, num_ranks // num_replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for options in [*SPREAD, *({"stage": s, "precision": "bf16"} for s in (1, 3))]:
        model, optimizer = build(rank, num_steps=0, fused=True, mesh=mesh, **options)
        check_replicas(model, optimizer)
        for step in range(3):
            x = torch.full((4, 8), float(rank)) + torch.eye(4, 8) * step
            loss = model(x).float().square().sum()
            check_replicas(model, optimizer)
            loss.backward()
            check_replicas(model, optimizer)
            optimizer.step()
            check_replicas(model, optimizer)
            optimizer.zero_grad()
        rows = engine_of(model).comm.control.exchange(model.seen.numpy().tobytes())
        assert len(set(rows)) == num_ranks  # a buffer that is each rank's own blames nobody


@on_ranks(2)
def test_state_that_only_one_rank_has_is_named(rank):
    model, _ = build(rank, stage=1)
    optimizer = adamw(model.parameters())
    if rank == 1:
        optimizer.state[model.get_parameter(NAME)] = {"step": torch.tensor(1.0)}
    said = refusal(model, optimizer)
    assert f"rank 1 has [parameter '{NAME}', step] where rank 0 has nothing more" in said
    check_replicas(model)


@on_ranks(3)
def test_only_the_first_of_many_differences_are_listed(rank):
    model, optimizer = build(rank, stage=0)
    if rank == 2:
        for param in model.parameters():
            flip_bit(param)
    said = refusal(model, optimizer)
    assert said.count("rank 2 differs") == 3
    assert f"; {len(list(model.parameters())) - 3} further tensors. " in said


@on_ranks(1)
def test_one_rank_has_nobody_to_compare_with(rank):
    model, optimizer = build(rank, stage=0)
    flip_bit(model.get_parameter(NAME))
    check_replicas(model, optimizer)
