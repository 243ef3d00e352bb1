"""Layout ``matrices``: optimizers that read whole matrices step as one process does."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise
from checking_device import CheckingDevice
from models import NormedBlock as Block
from oracle import assert_same_bits, plain_loop
from ranks import on_ranks, run_ranks
from shardwise.comm import coalesced, collectives
from shardwise.config import Schedule
from shardwise.errors import ConfigError, ReplicaError, ShardError
from shardwise.interop.fsdp2 import fully_shard
from trainer import backward_all, full_parameters, make_steps


class Model(nn.Module):
    """Odd shapes: matrices of one row and one column, an empty one, vectors, a scalar, 3 dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.none = nn.Parameter(torch.randn(0, 6))
        self.cube = nn.Parameter(torch.randn(2, 3, 6))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x * self.row + (x @ self.column) * self.scale + self.cube.sum(dim=(0, 1))
        return x.square().mean() + self.none.sum()


def batch(rank, step):
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randint(0, 11, (3, 4), generator=generator)


class Both(list):
    """Muon for the matrices, AdamW for the rest, one after the other."""

    def __init__(self, params):
        params = list(params)
        self.append(torch.optim.Muon([p for p in params if p.ndim == 2 and p.numel()], lr=0.05))
        self.append(torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01))

    def step(self):
        for each in self:
            each.step()


def sharded(stage, layout="matrices", mesh=None):
    return shardwise.shard(Model(), stage=stage, layout=layout, units=[nn.Sequential], mesh=mesh)


def tokens_of(random):
    return torch.randint(0, 11, (3, 4), generator=random)


def check_steps(rank, num_ranks, stage, mesh=None, replicas=1):
    steps = make_steps(num_ranks, 3, 2, tokens_of)
    model = sharded(stage, mesh=mesh)
    optimizer = shardwise.optim.Mixed(*Both(model.parameters()))
    for micro_batches in steps:
        backward_all(model, micro_batches, nn.Module.__call__, rank)
        optimizer.step()
        optimizer.zero_grad()
    truth = plain_loop(Model(), steps, nn.Module.__call__, Both, None, stage >= 2, replicas)
    assert_same_bits(full_parameters(model), truth.parameters)


@on_ranks(1, 2, 3)
def test_muon_and_adamw_make_the_steps_of_one_process(rank, num_ranks):
    for stage in range(4):
        check_steps(rank, num_ranks, stage)
    if num_ranks == 2:  # groups of one rank neither average nor add twice (Megatron-LM#6660)
        for replicas in (1, 2):
            shape, names = (replicas, 2 // replicas), ("replicate", "shard")
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            check_steps(rank, num_ranks, 3, mesh, replicas)


class Whitens(torch.optim.Optimizer):
    """Reads whole matrices; keeps a list, a tensor of another shape, a count, and options."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "num_steps": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._step(p, self.state[p])
        return loss

    def _step(self, p, state):
        assert p.grad is not None
        if not state:
            state |= {"num": 0, "mean": torch.zeros_like(p), "sums": torch.zeros(p.shape[0])}
            state["squares"] = [torch.zeros(p.shape[0], p.shape[0])]
        state["num"] += 1
        state["mean"] = state["mean"].lerp(p.grad, 0.1)
        state["sums"] += p.grad.sum(1)
        state["squares"][0] += p.grad @ p.grad.T
        found, basis = torch.linalg.eigh(state["squares"][0] + torch.eye(p.shape[0]))
        p.add_(basis @ (found.rsqrt()[:, None] * (basis.T @ state["mean"])), alpha=-0.1)


def train(model, optimizer, steps):
    """Take steps on the same batches on every rank, so that a power of two has the same means.

    Every second one is of a closure.
    """
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(batch(0, step))
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def whitens(model):
    return Whitens([p for p in model.parameters() if p.ndim == 2])


def stepped_by_adamw(model):
    return adamw(model.parameters())


def plainly(steps, make=whitens):
    model = Model()
    train(model, make(model), steps)
    return {name: p.detach() for name, p in model.named_parameters()}


def save_half_way(rank, num_ranks, stage, layout, make, path):
    model = sharded(stage, layout)
    optimizer = make(model)
    train(model, optimizer, range(2))
    shardwise.save(path, model, optimizer, step=1)
    return len(optimizer.state)


def go_on(rank, num_ranks, stage, layout, make, path):
    model = sharded(stage, layout)
    optimizer = make(model)
    shardwise.load(path, model, optimizer)
    train(model, optimizer, range(2, 4))
    if make is whitens:
        assert optimizer.num_steps == 2 and optimizer.param_groups[0]["num_steps"] == 4
    shardwise.check.replicas(model, optimizer)
    return full_parameters(model)


@pytest.mark.parametrize(
    ("first", "then"),  # ranks, stage and layout
    [
        ((2, 3, "matrices"), (4, 1, "matrices")),
        ((4, 1, "matrices"), (1, 3, "matrices")),
        ((1, 3, "matrices"), (2, 2, "matrices")),
        ((4, 3, "matrices"), (2, 2, "rows")),
        ((2, 3, "rows"), (4, 2, "matrices")),
        ((4, 3, "matrices"), (2, 2, "flat")),
        ((2, 3, "flat"), (4, 2, "matrices")),
    ],
)
def test_state_of_any_kind_goes_on_over_other_ranks_and_layouts(first, then, tmp_path):
    make = whitens if first[2] == then[2] else stepped_by_adamw
    num_states = run_ranks(save_half_way, *first, make, tmp_path / "saved")
    if make is whitens:  # of any kind, each matrix's on its owner; the empty one has none
        assert sum(num_states) == 7
    for found in run_ranks(go_on, *then, make, tmp_path / "saved"):
        assert_same_bits(found, plainly(range(4), make))


def choose(name, p):
    return "flat" if "embed" in name else "matrices"


def check_choice(rank, num_ranks):
    model = sharded(3, choose)
    with pytest.raises(ConfigError, match="returned 'rows' for 'row'; expected 'matrices'"):
        sharded(3, lambda name, p: "rows")
    with pytest.raises(ConfigError, match="the function raised ZeroDivisionError for 'row'"):
        sharded(3, lambda name, p: "flat" if 1 / 0 else "")
    return tuple(p.to_local().numel() for p in model.parameters() if p.ndim == 2)


def test_a_function_chooses_which_matrices_are_whole():
    whole = [p.numel() for p in Model().parameters() if p.ndim == 2]
    held = run_ranks(check_choice, 2)
    spread = [p.ndim == 2 and p.shape == (11, 6) for p in Model().parameters() if p.ndim == 2]
    for numel, is_spread, *parts in zip(whole, spread, *held, strict=True):
        assert sum(parts) == numel
        assert is_spread or sorted(parts) == [0, numel]


# With every other setting: the bits of stage 0, where every rank has all.
muon = partial(torch.optim.Muon, lr=0.05)
adamw = partial(torch.optim.AdamW, lr=0.01)


class Net(nn.Module):
    """A head tied to the embedding, a frozen matrix, blocks of which two have equal shapes."""

    def __init__(self, width=Block.WIDTH, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.mix = nn.Linear(width, width)
        self.mix.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.mix(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def net():
    torch.manual_seed(3)
    return Net()


def mixed(model):
    return shardwise.optim.Mixed.of(model, matrices=muon, rest=adamw)


def step(model, optimizer, steps, rank, clip=None):
    for number in steps:
        model(batch(rank, number)).backward()
        if clip is not None:
            shardwise.parallel.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def trained(rank, clip=None, **options):
    model = shardwise.shard(net(), units=[Block], **options)
    step(model, mixed(model), range(3), rank, clip)
    return full_parameters(model)


@on_ranks(1, 3)
def test_muon_and_adamw_have_the_bits_of_stage_0(rank, tmp_path):
    host, files = shardwise.Offload("cpu", "cpu", "cpu"), f"nvme:{tmp_path}"
    alike = {
        "fp32": [
            {"schedule": Schedule(0)},
            {"schedule": Schedule(bucket_bytes=1)},
            {"stage": 1},
            {"offload": files},
        ],
        "bf16": [
            {},
            {"schedule": Schedule(bucket_bytes=1)},
            {"stage": 2},
            {"offload": "cpu"},
            {"offload": host},
        ],
    }
    for precision, settings in alike.items():
        truth = trained(rank, stage=0, precision=precision)
        for options in settings:
            found = trained(rank, layout="matrices", precision=precision, **options)
            assert_same_bits(found, truth)
    clipped, plainly = (trained(rank, 0.1, **o) for o in ({"layout": "matrices"}, {"stage": 0}))
    torch.testing.assert_close(clipped, plainly)


@on_ranks(4)
def test_replicas_of_an_owner_step_alike_and_a_difference_is_found(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    truth = trained(rank, stage=0, mesh=mesh)
    for options in ({"stage": 1}, {"stage": 3}):
        assert_same_bits(trained(rank, mesh=mesh, layout="matrices", **options), truth)
    model = shardwise.shard(net(), units=[Block], mesh=mesh, layout="matrices")
    optimizer = mixed(model)
    step(model, optimizer, range(2), rank)
    shardwise.check.replicas(model, optimizer)
    weight = model.blocks[0].up.weight
    owner = shardwise.describe(model).units[1].params[2].owner
    if rank == owner:
        optimizer.state[weight]["momentum_buffer"].to_local()[0, 0] += 1
    with pytest.raises(ReplicaError, match=f"up.weight', state: ranks {owner}, {owner + 2} differ"):
        shardwise.check.replicas(model, optimizer)


SETTINGS = [(0, "fp32"), (1, "fp32"), (3, "fp32"), (3, "bf16")]


@on_ranks(2, 3)
def test_broadcasts_from_owners_and_reductions_to_them_give_the_same(rank, num_ranks):
    made = [{"layout": "matrices", "stage": stage, "precision": p} for stage, p in SETTINGS]
    truth = [trained(rank, **options) for options in made]
    with pytest.MonkeyPatch.context() as patch, CheckingDevice():
        patch.setattr(collectives, "_transport", lambda axis, device: coalesced)
        found = [trained(rank, **options) for options in made]
    for ours, theirs in zip(found, truth, strict=True):
        if num_ranks <= 2:  # a sum of two has one order
            assert_same_bits(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def count_bytes(rank, num_ranks, by):
    with pytest.MonkeyPatch.context() as patch, CheckingDevice():
        if by == "broadcasts":
            patch.setattr(collectives, "_transport", lambda axis, device: coalesced)
        model = shardwise.shard(net(), units=[Block], layout="matrices")
        optimizer = mixed(model)
        step(model, optimizer, range(1), rank)  # by now the first one's order is known
        before = dict(shardwise.debug.stats(model).sent_bytes)
        step(model, optimizer, range(1, 2), rank)
        sent = {k: n - before[k] for k, n in shardwise.debug.stats(model).sent_bytes.items()}
    others, gathered, reduced, num_trained = num_ranks - 1, 0, 0, 0
    for unit in shardwise.describe(model).units:
        params = {p.name: model.get_parameter(p.name) for p in unit.params}
        # The root and the last block stay full till backward.
        times = 1 if unit.name in ("", "blocks.2") else 2
        spread = spread_numel = 0
        for described in unit.params:
            param = params[described.name]
            own, numel = param.to_local().numel(), param.numel()
            assert (described.owner is not None) == (param.ndim == 2 and param.requires_grad)
            if not param.requires_grad:
                gathered += times * own * others * 4
                continue
            num_trained += 1
            if described.owner is None:
                spread, spread_numel = spread + own, spread_numel + numel
                continue
            gathered += times * own * others * 4
            reduced += (numel - own) * 4
        if by == "broadcasts":  # even shares, padding included
            spread = -(-spread_numel // num_ranks)
            gathered += times * spread * others * 4
            reduced += spread * others * 4
        else:
            gathered += times * spread * others * 4
            reduced += (spread_numel - spread) * 4
    reduced += num_trained * others * 4  # who had which gradient
    assert sent["shard.all_gather"] == gathered
    assert sent["shard.reduce_scatter"] == reduced
    assert not any(n for k, n in sent.items() if not k.endswith(("all_gather", "reduce_scatter")))
    weight = model.blocks[0].up.weight
    before = shardwise.debug.stats(model).sent_bytes.get("shard.scalars", 0)
    weight.full_tensor()
    sent_whole = shardwise.debug.stats(model).sent_bytes.get("shard.scalars", 0) - before
    assert sent_whole == weight.to_local().nbytes * others  # by its owner alone
    held = sum(p.to_local().nbytes for p in model.parameters())
    padding = shardwise.debug.stats(model).param_shard_bytes - held
    assert 0 <= padding < 4 * 32 * len(list(model.parameters()))
    return sum(p.to_local().numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("by", ["messages", "broadcasts"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_owners_send_their_matrices_and_get_their_gradients_to_the_byte(num_ranks, by):
    held = run_ranks(count_bytes, num_ranks, by)
    assert (
        max(held) - min(held) <= Block.HIDDEN * Block.WIDTH + 36
    )  # the largest, and the frozen one's rows


@on_ranks(1, 2)
def test_optimizers_built_before_saved_loaded_and_copied_go_on(rank, tmp_path):
    folder = str(tmp_path / "saved")
    built = net()
    optimizer = mixed(built)
    before = shardwise.shard(built, units=[Block], layout="matrices", optimizer=optimizer)
    step(before, optimizer, range(2), rank)
    after = shardwise.shard(net(), units=[Block], layout="matrices")
    theirs = mixed(after)
    step(after, theirs, range(2), rank)
    assert_same_bits(full_parameters(before), full_parameters(after))
    _again, its_own = copy.deepcopy((after, theirs))
    for group in its_own.param_groups:  # of what was copied with the model, nothing is shared
        assert not {*map(id, group["params"])} & {*map(id, after.parameters())}
    shardwise.save(folder, after, theirs, step=1)
    step(after, theirs, range(2, 4), rank)
    shardwise.load(folder, before, optimizer)
    theirs.param_groups[0]["lr"] = 1.0
    assert theirs.optimizers[0].param_groups[0]["lr"] == 1.0
    step(before, optimizer, range(2, 4), rank)
    assert_same_bits(full_parameters(before), full_parameters(after))
    # torch's own dict of the state, which load_state_dict copies.
    other = mixed(before)
    other.load_state_dict(optimizer.state_dict())
    step(before, other, range(4, 5), rank)
    theirs.param_groups[0]["lr"] = 0.05
    step(after, theirs, range(4, 5), rank)
    assert_same_bits(full_parameters(before), full_parameters(after))


@on_ranks(2)
def test_what_cannot_be_is_refused(rank):
    with pytest.raises(ConfigError, match=r"'matrices' \(each matrix whole on one rank\)"):
        shardwise.shard(net(), layout="columns")
    model = shardwise.shard(net(), units=[Block])
    optimizer = mixed(model)
    model(batch(rank, 0)).backward()
    with pytest.raises(ShardError, match=r"Muon asks for .* shard\(layout='matrices'\)"):
        optimizer.step()
    with pytest.raises(ConfigError, match="two of its optimizers have the same parameter"):
        shardwise.optim.Mixed(adamw(model.parameters()), adamw(model.parameters()))
    with pytest.raises(ConfigError, match="add it there first"):
        optimizer.add_param_group({"params": [model.mix.weight]})
    with pytest.raises(ConfigError, match=r"use torch\.optim\.AdamW"):
        shardwise.optim.Mixed(shardwise.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="has no parameters that are matrices"):
        shardwise.optim.Mixed.of(nn.LayerNorm(3), muon, adamw)
    with pytest.raises(ConfigError, match="expected optimizers of torch"):
        shardwise.optim.Mixed()
    chosen = shardwise.optim.Mixed.of(model, muon, adamw, lambda name, p: "down.weight" in name)
    assert len(chosen.param_groups[0]["params"]) == 3


@on_ranks(2)
def test_under_fully_shard_muon_steps_as_under_torchs_with_collectives_of_torch(rank):
    found = []
    for how in (fully_shard, torch_fully_shard):
        model = how(net())
        step(model, mixed(model), range(2), rank)
        found.append(full_parameters(model))
    assert_same_bits(*found)


ADAMWS = ("exp_avg", "exp_avg_sq")


@on_ranks(2)
def test_each_part_of_a_mixed_optimizer_rests_where_it_would_by_itself(rank, tmp_path):
    """AdamW is overlapped and rests in files, Muon steps plainly and rests on the host."""
    offload = shardwise.Offload("cpu", "cpu", f"nvme:{tmp_path}")
    model = shardwise.shard(net(), units=[Block], layout="matrices", offload=offload)
    optimizer = mixed(model)
    step(model, optimizer, range(3), rank)
    counts = [
        state["step"] for state in optimizer.state_dict()["state"].values() if "step" in state
    ]
    assert counts == [3] * len(optimizer.param_groups[1]["params"])
    of_adamw, of_muon = 0, 0
    for state in optimizer.state.values():
        of_adamw += sum(state[key].to_local().nbytes for key in ADAMWS if key in state)
        of_muon += state["momentum_buffer"].to_local().nbytes if "momentum_buffer" in state else 0
    places = shardwise.debug.stats(model, optimizer).bytes_by_place
    assert places["files"] == of_adamw > 0
    held = shardwise.debug.stats(model).bytes_by_place["host"]
    assert places["host"] == held + of_muon + 4 * len(counts)


@on_ranks(2)
def test_scaled_losses_and_skipped_steps_are_those_of_stage_0(rank):
    """A gradient that overflows on one owner alone makes all ranks skip the step."""
    found = []
    for options in ({"stage": 0}, {"layout": "matrices"}):
        model = shardwise.shard(net(), units=[Block], precision="fp16", **options)
        optimizer = mixed(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            scaler.scale(model(batch(rank, number))).backward()
            weight = model.blocks[1].up.weight
            if number == 1 and weight.grad.to_local().numel():
                weight.grad.to_local()[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        found.append(full_parameters(model))
    assert_same_bits(*found)


@on_ranks(2)
def test_the_loop_of_the_page_learns():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "matrices.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names = {"model": net(), "shardwise": shardwise, "torch": torch}
    exec(code, names)
    model, optimizer = names["model"], names["optimizer"]
    muon_has, adamw_has = (group["params"] for group in optimizer.param_groups)
    assert len(muon_has) == 6 and len(adamw_has) == 1 + 1 + 3 * 4  # embedding, bias; norms, biases
    losses = []
    for _ in range(30):
        losses.append(float(model(batch(0, 0)).detach()))
        model(batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
