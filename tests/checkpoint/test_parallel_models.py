"""Checkpoints of models over several meshes: saved under any of them, loaded under any other."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from models import NormedBlock, NormedStack
from ranks import RankError, start_ranks
from saving import same
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.manifest import parse_manifest
from shardwise.checkpoint.verify import verify
from shardwise.config import Units
from shardwise.interop.fsdp2 import fully_shard

WIDTH, HIDDEN = NormedBlock.WIDTH, NormedBlock.HIDDEN


class Block(NormedBlock):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(HIDDEN, 2))


class Net(NormedStack):
    block_class, outputs = Block, 4


@dataclass(frozen=True)
class How:
    """How a model is cut: ranks of data and of tensor parallelism, and what else."""

    dp: int
    tp: int
    stage: int = 3
    layout: str = "rows"
    replicas: int = 1
    dims: bool = False  # one weight is cut along dim 1
    parts: bool = False  # one weight is cut over a part of the ranks
    fully: bool = False  # by fully_shard
    experts: bool = False  # one weight is a DTensor over some of the ranks that share the others

    @property
    def world(self):
        return self.dp * self.tp


def build(how):
    """Return a model and an optimizer with its state, all elements zero."""
    names = ("replicate", "shard", "tp")
    sizes = (how.replicas, how.dp // how.replicas, how.tp)
    world = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dp = world["replicate", "shard"] if how.replicas > 1 else world["shard"]
    model = Net()
    if how.experts:
        world = init_device_mesh("cpu", (how.dp, how.tp), mesh_dim_names=("efsdp", "ep"))
        dp, up = world._flatten("all"), model.layers[1].up
        up.weight = nn.Parameter(distribute_tensor(up.weight, world["ep"], [Shard(0)]))
    elif how.tp > 1:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        for block in model.layers:
            parallelize_module(block, world["tp"], plan)
            whole = block.seen
            cut = [Shard(0)]
            block.seen = distribute_tensor(whole, world["tp"], cut)
    if how.fully:
        place = (lambda p: Shard(1) if p.shape == (4, WIDTH) else None) if how.dims else None
        for block in model.layers:
            fully_shard(block, mesh=dp)
        fully_shard(model, mesh=dp, shard_placement_fn=place)
    else:
        placements = {}
        if how.dims:
            placements["head.weight"] = Shard(1)
        if how.experts:
            placements["layers.1.up.weight"] = world["efsdp"]
        if how.parts:
            placements["layers.1.up"] = init_device_mesh("cpu", (how.dp // 2, 2))
        shardwise.shard(
            model,
            stage=how.stage,
            layout=how.layout,
            mesh=dp,
            units=Units(Block, placements=placements or None),
        )
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():  # as a step would
        moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        optimizer.state[param] = {"step": torch.zeros(()), **moments}
    return model, optimizer


def tensors(model, optimizer):
    """Return this rank's tensors of all state, as they are held."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name} {key}"] = value
    return dict(sorted(found.items()))


@torch.no_grad()
def numbers_of(model, optimizer):
    """Return a number for each element that this rank has, the same however it is cut."""
    found = []
    for number, tensor in enumerate(tensors(model, optimizer).values()):
        whole = torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number
        cut = getattr(tensor, "_cut", None)
        if cut is not None:
            whole = cut.slice_of(whole)
        elif isinstance(tensor, DTensor):
            spec = tensor.device_mesh, tensor.placements
            made = DTensor.from_local(whole, spec[0], [Replicate()] * spec[0].ndim)
            whole = made.redistribute(*spec).to_local()
        found.append(whole)
    return found


def here(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(model, optimizer, save, numbers):
    """Give each element its number in this save."""
    for tensor, own in zip(tensors(model, optimizer).values(), numbers, strict=True):
        here(tensor).copy_(own + 10**5 * save)


def wrong(model, optimizer, save, numbers):
    """Return what of this rank is not as `fill` made it."""
    return [
        name
        for (name, tensor), own in zip(tensors(model, optimizer).items(), numbers, strict=True)
        if not same(here(tensor).detach(), (own + 10**5 * save).to(tensor.dtype))
    ]


def save_as(rank, world_size, hows, folder):
    """Save under each way, at once and in the background; return the formats."""
    formats = []
    for number, how in enumerate(hows):
        model, optimizer = build(how)
        numbers = numbers_of(model, optimizer)
        fill(model, optimizer, number, numbers)
        path = folder / str(hows.index(how))
        shardwise.save(path / "once", model, optimizer, extra={"rank": rank})
        with shardwise.Checkpoints(path / "run", model, optimizer) as checkpoints:
            saving = checkpoints.save(1, extra={"rank": rank})
            fill(model, optimizer, 99, numbers)  # in the background older values are written
            saving.wait()
        if rank == 0:
            for each in (path / "once", path / "run" / "step-00000001"):
                assert verify(Files(), each).ok, verify(Files(), each).findings
                data = (each / "manifest.json").read_bytes()
                formats.append(parse_manifest(data, "x").format)
    return formats


def load_as(rank, world_size, hows, saves, every):
    """Load one of so many checkpoints under each way, others under the next; return what is wrong.

    With 1, every checkpoint under every way.
    """
    problems = []
    for number, how in enumerate(hows):
        model, optimizer = build(how)
        numbers = numbers_of(model, optimizer)
        for save, ranks, path in saves[(number + world_size) % every :: every]:
            fill(model, optimizer, 98, numbers)
            loaded = shardwise.load(path, model, optimizer)
            found = wrong(model, optimizer, save, numbers)
            problems += [f"{path} in {how}: {name}" for name in found]
            if loaded.extra != {"rank": rank % ranks}:
                problems.append(f"{path} in {how}: extra {loaded.extra}")
    return problems


WAYS = {
    1: [How(1, 1)],
    3: [How(3, 1, 2, "flat"), How(1, 3), How(3, 1, fully=True, dims=True)],
    4: [
        How(2, 2, dims=True),
        How(2, 2, 0, "flat"),
        How(2, 2, 2, "flat", replicas=2),
        How(1, 4, 1),
        How(2, 2, experts=True),
        How(4, 1, parts=True),
        How(4, 1, replicas=2),
        How(2, 2, fully=True, dims=True),
    ],
}


def in_fresh_ranks(fn, size, *args):
    """Run in processes of their own: DTensor keeps meshes, whose groups a pool would have ended."""
    outcomes = start_ranks(fn, size, *args).wait()
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.result for outcome in outcomes]


def save_all(folder):
    """Save under every way; return which one it was, of how many ranks, and where."""
    found = []
    for size, hows in WAYS.items():
        formats = in_fresh_ranks(save_as, size, hows, folder / str(size))[0]
        for number, how in enumerate(hows):
            path = folder / str(size) / str(number)
            is_plain = how.tp == 1 and not how.dims and not how.parts
            assert formats[2 * number : 2 * number + 2] == [1 if is_plain else 2] * 2, how
            found += [(number, size, path / "once"), (number, size, path / "run")]
    return found


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_what_is_saved_over_any_meshes_loads_over_any_others(saves, size, every=7):
    problems = in_fresh_ranks(load_as, size, WAYS[size], saves, every)
    assert not any(problems), problems


def test_a_plain_model_in_one_process_loads_pieces(saves):
    for save, _, path in saves[::3]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        shardwise.load(path, model, optimizer)
        assert not wrong(model, optimizer, save, numbers_of(model, optimizer))
