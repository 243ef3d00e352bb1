"""Mixtures of experts over any axes: the steps of one process, wherever the experts lie."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.comm.exchange import Exchange
from shardwise.config import Units
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from shardwise.parallel.experts import (
    MixtureOfExperts,
    RoutedExperts,
    at_experts,
    local_of,
    spread_experts,
)
from shardwise.parallel.routing import Routing, balance_experts
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.shapes import DecoderShape, Experts
from shardwise.train.decoder import spread_decoder
from trainer import full

DIM, FFN, EXPERT, HEAD, VOCAB, LENGTH, LAYERS = 8, 10, 12, 4, 13, 5, 2
STEPS = 3


@dataclass(frozen=True)
class Cell:
    """One composition: degrees, how many experts, and what it is sharded by."""

    degrees: dict[str, int] = field(default_factory=dict)
    experts: int = 12
    by: Any = 3  # a stage of shard(), or "fully_shard"
    precision: str = "fp32"
    micro_batches: int = 1
    top_k: int = 2
    shared: int = 1
    dense: int = 0
    sigmoid: bool = False
    balance: float = 0.0
    biased: bool = False
    checkpointed: bool = False
    layout: str = "rows"
    along: int = 0  # the dim of an expert's weights that data parallelism cuts
    offload: str | None = None

    def make(self):
        torch.manual_seed(0)
        scoring = "sigmoid" if self.sigmoid else "softmax"
        experts = Experts(self.experts, self.top_k, EXPERT, self.shared, self.dense, scoring)
        sizes = LAYERS, DIM, DIM // HEAD, 1, HEAD, FFN, VOCAB
        shape = DecoderShape(*sizes, experts=experts)
        made = PlainDecoder(shape, self.checkpointed, 0.0, self.balance, self.biased)
        for name, param in made.named_parameters():  # so large that rounding decides no choice
            if name.endswith("router.weight"):
                nn.init.normal_(param)
            elif param.ndim > 1:
                nn.init.normal_(param, std=0.3)
        return made

    def compose(self, model, axes):
        if axes.tp > 1 and self.shared:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks[self.dense :]:
                parallelize_module(block.feed_forward.shared, axes["tp"], plan)
        spread_experts(model, axes)
        if self.by == "fully_shard":
            policy = torch.distributed.fsdp.MixedPrecisionPolicy(
                torch.bfloat16 if self.precision == "bf16" else None, torch.float32
            )
            place = (lambda p: Shard(self.along) if p.ndim == 3 else None) if self.along else None
            for block in model.blocks:
                fully_shard(block, mesh=axes, mp_policy=policy, shard_placement_fn=place)
            return fully_shard(model, mesh=axes, mp_policy=policy)
        placements = {"*.experts": (axes.experts, Shard(self.along))} if self.along else None
        return shardwise.shard(
            model,
            mesh=axes,
            offload=self.offload,
            stage=self.by,
            layout=self.layout,
            precision=self.precision,
            units=Units(experts="*.experts", placements=placements),
        )


# In each layer a norm, attention, a norm, the router with its softmax, experts, their mixture and
# the shared one; then the last norm, logits and their softmax.
SUMS = (
    *(DIM, DIM, HEAD, LENGTH, DIM, DIM, DIM, 12, DIM, EXPERT, 3, DIM, EXPERT) * LAYERS,
    *(DIM, DIM, VOCAB),
)


def alike(ours, theirs, roundings, what, precision):
    """Within the roundings of fp32; in bf16 a rank's sum is rounded, and what is made of it."""
    ours, theirs = full(ours), theirs.detach()
    if precision == "bf16":
        ours, theirs, roundings = ours.bfloat16(), theirs.bfloat16(), 12
    assert_rounded_alike(ours, theirs, roundings, what)


def reference(cell):
    """Return one process's model; in bf16 one that `shard()` has given the same casts."""
    plain = replace(cell, checkpointed=False).make()
    if cell.precision == "fp32":
        return plain
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
    return shardwise.shard(plain, mesh=alone["one"], precision=cell.precision)


def batch_of(step, micro_batch, rows):
    generator = torch.Generator().manual_seed(10 * step + micro_batch)
    ids = torch.randint(VOCAB, (2, rows, LENGTH), generator=generator)
    return ids[0], ids[1]


def step_of(model, optimizer, parts):
    """Take one step, clipped; return the gradients before that, whole, and their norm."""
    for number, (ids, targets) in enumerate(parts):
        if len(parts) == 1:
            model(ids, targets).backward()
        elif isinstance(model, PlainDecoder) and not hasattr(model, "no_sync"):
            (model(ids, targets) / len(parts)).backward()
        else:
            with shardwise.accumulate(model, last=number == len(parts) - 1):
                (model(ids, targets) / len(parts)).backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    norm = shardwise.parallel.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    balance_experts(model, rate=0.05)
    return grads, norm


class Choices:
    """The experts that the whole batch's tokens were sent to, layer by layer, in one process."""

    def __init__(self, plain):
        self.found = []
        for module in plain.modules():
            if isinstance(module, RoutedExperts):
                module.register_forward_pre_hook(lambda _, args: self.found.append(args[1]))

    def taken(self):
        found, self.found = self.found, []
        return found


def sent_by_formula(cell, axes, choices):
    """Return the bytes that all ranks' tokens make: each row four ways, and the counts once.

    A row goes to its expert and comes back, and so does its gradient, where the expert is another
    rank's; a checkpointed layer does its forward pass twice.
    """
    ep, tp = axes["ep"], axes["tp"]
    own, per_rank = ep.get_local_rank(), cell.experts // ep.size()
    away = torch.zeros((), dtype=torch.int64)
    for chosen in choices:
        mine = chosen.chunk(axes["loss"].size())[axes["loss"].get_local_rank()]
        share = -(-len(mine) // tp.size())
        mine = mine[share * tp.get_local_rank() : share * (tp.get_local_rank() + 1)]
        away += (mine // per_rank != own).sum()
    dist.all_reduce(away)
    passes = 2 if cell.checkpointed else 1
    size = 2 if cell.precision == "bf16" else 4
    counts = 8 * per_rank * (ep.size() - 1) * dist.get_world_size()
    return int(away) * DIM * size * (2 * passes + 2) + len(choices) * passes * counts


def sent_between_experts(model):
    sent = torch.tensor(shardwise.debug.stats(model).sent_bytes.get("ep.all_to_all", 0))
    dist.all_reduce(sent)
    return int(sent)


def trains_as_one_process_does(cell):
    """Three steps, in bf16 one: gradients, norms, parameters, biases, and the bytes of tokens."""
    axes = shardwise.Axes(**cell.degrees)
    plain = reference(cell)
    start = cell.make()
    model = cell.compose(start, axes)
    size, place = axes["loss"].size(), axes["loss"].get_local_rank()
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    rows = 2
    choices, before = Choices(plain), 0
    base = of_gradient(*SUMS, over=rows * size * LENGTH)
    # In bf16 a step's roundings send tokens to other experts, and then gradients are others.
    for step in range(STEPS if cell.precision == "fp32" else 1):
        batches = [batch_of(step, m, rows * size) for m in range(cell.micro_batches)]
        mine = slice(rows * place, rows * (place + 1))
        parts = [(ids[mine], targets[mine]) for ids, targets in batches]
        grads, norm = step_of(model, ours, parts)
        wanted, right = step_of(plain, theirs, batches)
        roundings, what = base * (step + 1), f"{cell}, step {step}"
        now, taken = sent_between_experts(model), choices.taken()
        assert now - before == sent_by_formula(cell, axes, taken), what
        before = now
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            alike(grad, wanted[name], roundings, f"gradient of {name}, {what}", cell.precision)
        alike(norm, full(right), roundings, f"norm, {what}", cell.precision)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            alike(p, full(q), roundings, f"{name}, {what}", cell.precision)
        for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(b, c), f"{name}, {what}"
    if cell.biased:
        assert all(b.any() for name, b in model.named_buffers() if name.endswith("bias"))
    if cell.by != "fully_shard":
        shardwise.check.replicas(model, ours)
        can_be_copied(model)


def can_be_copied(model):
    """A copy sends its tokens to the same ranks, and counts its own."""
    ids, targets = batch_of(9, 0, 2)
    before = sent_between_experts(model)
    right = model.eval()(ids, targets)
    each = sent_between_experts(model) - before
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids, targets), right)
    assert sent_between_experts(twin) == each


# Gradients and norms that are ep or tp times too large elsewhere (Megatron-LM#5956, #5916, #6660,
# pytorch#160285), and last micro-batches that are lost (Fast-LLM#550), are among these.
CELLS = {
    1: [
        Cell(balance=0.1, biased=True, sigmoid=True, micro_batches=3),
    ],
    2: [
        Cell({"ep": 2}, by=0, balance=0.1),
        Cell({"ep": 2}, by=1, biased=True, checkpointed=True, balance=0.1, dense=1),
        Cell({"ep": 2}, by=2, micro_batches=3, sigmoid=True, biased=True),
        Cell({"ep": 2}, by="fully_shard", micro_batches=3, balance=0.1),
        Cell({"tp": 2, "ep": 2}, by=3, top_k=3),
        Cell({"tp": 2}, by=3, biased=True),
    ],
    3: [
        Cell({"ep": 3}, by=3, balance=0.1, biased=True, layout="flat"),
        Cell({"tp": 3, "ep": 3}, by=2, balance=0.1, micro_batches=3),
    ],
    4: [
        Cell({"ep": 2}, experts=2, by=3, shared=0, sigmoid=True, balance=0.1),
        Cell({"ep": 2, "dp_replicate": 2}, by=3, micro_batches=3, biased=True),
        Cell({"ep": 2, "tp": 2}, by=3, precision="bf16", biased=True),
        Cell({"ep": 4, "tp": 2}, by="fully_shard", experts=4, balance=0.1, biased=True),
        Cell({"ep": 4}, by=3, micro_batches=3, checkpointed=True, offload="cpu"),
        Cell({"cp": 2, "ep": 2}, experts=4, by=3, along=1, biased=True),
    ],
}
# With these the matrix is whole: `make soak CAMPAIGN=matrices`.
MORE_CELLS = {
    1: [Cell(by="fully_shard", balance=0.1)],
    2: [Cell({"ep": 2}, by=3, experts=2, precision="bf16")],
    3: [Cell({"ep": 3}, experts=3, by="fully_shard", precision="bf16")],
    4: [
        Cell({"ep": 4}, experts=4, by=2, balance=0.1, biased=True),
        Cell({"ep": 2, "dp_replicate": 2}, by="fully_shard", balance=0.1),
        Cell({"ep": 2, "tp": 4}, by=3, balance=0.1, top_k=1),
        Cell({"ep": 2}, experts=2, by="fully_shard", along=2),
    ],
}


@pytest.mark.parametrize("num_ranks", CELLS)
@on_ranks()
def test_experts_over_any_axes_train_as_one_process_does(num_ranks):
    for cell in CELLS[num_ranks]:
        trains_as_one_process_does(cell)


# -- tokens and experts that are not there
class Layer(nn.Module):
    """A mixture between two maps, for batches of any number of tokens."""

    def __init__(self, routing):
        super().__init__()
        self.before = nn.Linear(DIM, DIM)
        self.moe = MixtureOfExperts(DIM, EXPERT, routing, std=0.5, out_std=0.5)
        self.after = nn.Linear(DIM, 3)

    def forward(self, x):
        y, balance = self.moe(self.before(x))
        return self.after(x + y), balance


@pytest.mark.parametrize("by", [3, 1, "fully_shard"])
@on_ranks(1, 3, 4)
def test_ranks_without_tokens_and_experts_without_tokens_take_part(rank, num_ranks, by):
    """Rank 0 has no token, the last one most; experts from the third on are never chosen."""
    torch.manual_seed(3)
    routing = Routing(12, 2, "sigmoid", scale=2.5, balanced=True, biased=True)
    plain = Layer(routing)
    plain.moe.router.bias[:2] += 9.0
    model = copy.deepcopy(plain)
    axes = shardwise.Axes(ep=num_ranks)
    spread_experts(model, axes)
    if by == "fully_shard":
        fully_shard(model.moe, mesh=axes)
        fully_shard(model, mesh=axes)
    else:
        shardwise.shard(
            model, mesh=axes, stage=by, units=Units(MixtureOfExperts, experts="*.experts")
        )
    bounds = [0, 0, *range(1, num_ranks - 1), 9] if num_ranks > 1 else [0, 9]
    for step in range(2):
        x = torch.randn(9, DIM, generator=torch.Generator().manual_seed(step))
        mine = x[bounds[rank] : bounds[rank + 1]]
        found, balance = model(mine)
        (found.square().sum() * num_ranks / len(x) + 0.1 * balance).backward()
        wanted, whole_balance = plain(x)
        (wanted.square().sum() / len(x) + 0.1 * whole_balance).backward()
        total = balance.detach().clone()
        dist.all_reduce(total)
        roundings = of_gradient(DIM, DIM, 12, DIM, EXPERT, 2, DIM, over=9)
        assert_rounded_alike(total / num_ranks, whole_balance.detach(), roundings, "balance")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_rounded_alike(full(p.grad), q.grad, roundings, name)
        gates = full(model.moe.experts.gate.grad)
        assert gates[:2].any() and not gates[2:].any()
        balance_experts(model, 0.0)  # forgets the load
        balance_experts(plain, 0.0)
    if num_ranks > 1:  # no rank has a token
        found, balance = model(x[:0])
        (found.sum() + balance).backward()
        sent = shardwise.debug.stats(model).num_collectives
        assert sent["loss.all_reduce"] == 5


# -- checkpoints
def saved(rank, num_ranks, folder, cells):
    """Train a step and save, under each cell."""
    for name, cell in cells.items():
        axes = shardwise.Axes(**cell.degrees)
        model = cell.compose(cell.make(), axes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rows, place = axes["loss"].size(), axes["loss"].get_local_rank()
        ids, targets = (t.chunk(rows)[place] for t in batch_of(1, 0, 12))
        step_of(model, optimizer, [(ids, targets)])
        shardwise.save(folder / name, model, optimizer)
        state = {n: full(p) for n, p in model.named_parameters()}
        state |= {
            f"{n} moment": full(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()
        }
        state |= dict(model.named_buffers())
        if rank == 0:
            torch.save(state, folder / f"{name}.pt")


def loaded(rank, num_ranks, folder, cells, names):
    """Load every second save under each cell of this world; the values are those of the save."""
    for number, cell in enumerate(cells.values()):
        model = cell.compose(cell.make(), shardwise.Axes(**cell.degrees))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for name in names[(number + num_ranks) % 2 :: 2]:
            holds(model, optimizer, folder, name)


def holds(model, optimizer, folder, name):
    shardwise.load(folder / name, model, optimizer)
    state = torch.load(folder / f"{name}.pt")
    for key, p in model.named_parameters():
        if "blocks.0." in key:
            continue  # the dense layer, which other tests have
        assert torch.equal(full(p), state[key]), f"{key} of {name}"
        moment = full(optimizer.state[p]["exp_avg"])
        assert torch.equal(moment, state[f"{key} moment"]), f"{key} of {name}"
    for key, buffer in model.named_buffers():
        if key.endswith("bias"):
            assert torch.equal(buffer, state[key]) and buffer.any(), f"{key} of {name}"


SAVED = {
    1: {"one": Cell(dense=1, biased=True)},
    3: {"ep3": Cell({"ep": 3}, by=2, layout="flat", dense=1, biased=True)},
    4: {
        "ep4": Cell({"ep": 4}, by=1, dense=1, biased=True),
        "ep2": Cell({"ep": 2, "dp_replicate": 2}, by=3, dense=1, biased=True),
        "ep2fully": Cell({"ep": 2, "tp": 2}, by="fully_shard", dense=1, biased=True),
    },
}


def test_checkpoints_of_any_degree_of_ep_load_into_any_other(tmp_path):
    for size, cells in SAVED.items():
        run_ranks(saved, size, tmp_path, cells)
    names = [name for cells in SAVED.values() for name in cells]
    for size, cells in SAVED.items():
        run_ranks(loaded, size, tmp_path, cells, names)
    plain = SAVED[1]["one"].make()
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False)
    for name in names:
        holds(plain, optimizer, tmp_path, name)


@on_ranks(3)
def test_a_decoder_on_meta_gets_the_same_experts_for_any_ep(rank, num_ranks):
    found = []
    for ep in (1, num_ranks):
        axes = shardwise.Axes(ep=ep)
        with torch.device("meta"):
            model = Cell(biased=True).make()
        spread_experts(model, axes)
        torch.manual_seed(7 + rank)
        shardwise.shard(model, mesh=axes, units=Units(experts="*.experts"))
        found.append([*map(full, model.parameters()), *model.buffers()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and not a.is_meta


# -- axes of one rank
@on_ranks(1, 2)
def test_axes_of_one_rank_cost_no_collective_and_no_bit(rank, num_ranks):
    found, sent = [], []
    for spreads in (False, True):
        cell = Cell(balance=0.1, biased=num_ranks == 1)
        model = cell.make()
        if spreads:
            spread_experts(model, shardwise.Axes())
        local = not spreads or num_ranks == 1
        assert local == all(m.exchange is None for m in model.modules() if hasattr(m, "exchange"))
        shardwise.shard(
            model, mesh=shardwise.Axes(), units=Units(experts="*.experts" if spreads else ())
        )
        assert not any(len(p.placements) > 1 for p in model.parameters())
        ids, targets = batch_of(rank, 0, 2)
        (model(ids, targets, with_balance=True)[0]).backward()
        found.append([full(p.grad) for p in model.parameters()])
        sent.append(dict(shardwise.debug.stats(model).num_collectives))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    loads = sent[1].pop("loss.all_reduce", 0)
    assert sent[0] == sent[1]
    assert loads == (LAYERS if num_ranks > 1 else 0)  # of the auxiliary loss, which is asked for


# -- a layer of one's own
class OwnExperts(nn.Module):
    """Two matrices for each expert; each token meets one, by its first element."""

    exchange: Exchange | None = None

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, DIM, DIM) / DIM)
        self.down = nn.Parameter(torch.randn(6, DIM, DIM) / DIM)

    def forward(self, x):
        chosen = (x[:, :1].detach() * 3).long().clamp(-3, 2) + 3
        return at_experts(x, chosen, 6, self.exchange, self.compute).squeeze(1)

    def compute(self, rows, counts):
        weights = zip(local_of(self.up), local_of(self.down), strict=True)
        parts = zip(rows.split(list(counts)), weights, strict=True)
        return torch.cat([torch.tanh(part @ up) @ down for part, (up, down) in parts])


class OwnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)
        self.experts = OwnExperts()

    def forward(self, x):
        return self.last(x + self.experts(self.first(x)))


@on_ranks(1, 3)
def test_a_layer_of_ones_own_is_spread_too_and_knows_nothing_of_tensor_parallelism(num_ranks):
    def make():
        torch.manual_seed(5)
        return OwnNet()

    def compose(model):
        spread_experts(model, axes, experts="experts")
        return shardwise.shard(model, mesh=axes, units=Units(experts="experts"))

    batch = torch.randn(12, DIM, generator=torch.Generator().manual_seed(1))
    for axes in (shardwise.Axes(ep=num_ranks), shardwise.Axes(ep=num_ranks, tp=num_ranks)):
        shardwise.check.gradients(make, batch, axes, compose=compose)


# -- the decoder over tensor parallelism, whose ranks have parts of the tokens between layers
@on_ranks(4)
def test_the_decoder_is_cut_over_tp_and_its_experts_over_ep():
    experts = Experts(12, 2, EXPERT, shared=1, dense_layers=1)
    shape = DecoderShape(2, DIM, 2, 2, HEAD, FFN, 14, experts=experts)
    tokens = torch.randint(14, (2, 8, 6), generator=torch.Generator().manual_seed(0))
    for degrees in ({"tp": 2, "ep": 4}, {"tp": 4, "ep": 2}):
        axes = shardwise.Axes(**degrees)
        heads = {"heads": axes.tp, "kv_heads": axes.tp, "head_dim": 4}
        with_heads = replace(shape, ffn=12, vocab=16, **heads)

        def make(shape=with_heads):
            torch.manual_seed(0)
            made = PlainDecoder(shape, balance=0.1)
            for param in made.parameters():
                if param.ndim > 1:
                    nn.init.normal_(param, std=0.3)
            return made

        def compose(model, axes=axes):
            spread_decoder(spread_experts(model, axes), axes)
            return shardwise.shard(model, mesh=axes, units=Units(experts="*.experts"))

        ids, targets = tokens if axes.tp == 2 else tokens[:, :, :4]
        shardwise.check.gradients(
            make, (ids, targets), axes, compose=compose, loss=lambda model, batch: model(*batch)
        )


# -- stages of a pipeline, of which some have no experts
@on_ranks(4)
def test_a_stage_of_a_pipeline_may_have_no_experts(rank):
    """Each pair of ranks trains another model, with names that fit only one of them."""
    axes = shardwise.Axes(pp=2, ep=2)
    plain = Cell(dense=LAYERS if rank < 2 else 0, biased=True).make()
    for by in (3, "fully_shard"):
        cell = Cell({"pp": 2, "ep": 2}, dense=LAYERS if rank < 2 else 0, by=by, biased=True)
        model = cell.compose(cell.make(), axes)
        batch = batch_of(0, 0, 4)
        model(*(t.chunk(2)[rank % 2] for t in batch)).backward()
        plain(*batch).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            alike(p.grad, q.grad, of_gradient(*SUMS, over=4 * LENGTH), name, "fp32")
        balance_experts(model)
        plain.zero_grad()


# -- what is refused
@on_ranks(2)
def test_what_does_not_fit_is_refused_with_what_to_do():
    axes = shardwise.Axes(ep=2)
    model = Cell(experts=3).make()
    before = list(model.parameters())
    with pytest.raises(ConfigError, match=r"gate' \(3, 12, 8\): .*ep=2 does not divide"):
        spread_experts(model, axes)
    with pytest.raises(ConfigError, match=r"'\*.expert' is the name of no module"):
        spread_experts(model, axes, experts="*.expert")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    model = Cell().make()
    spread_experts(model, axes)
    with pytest.raises(ConfigError, match=r"gate' is a DTensor already; call spread_experts"):
        spread_experts(model, axes)
    with pytest.raises(ConfigError, match=r"one of the experts.*experts='\*.experts'"):
        shardwise.shard(model, mesh=axes)
    with pytest.raises(ConfigError, match=r"one of the experts.*experts='\*.experts'"):
        shardwise.shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError, match=r"gate' is a DTensor.*mesh=shardwise.Axes"):
        fully_shard(model, mesh=axes.data)
    model = Cell(biased=True).make()
    shardwise.shard(model, mesh=axes)
    with pytest.raises(ConfigError, match="the routers have no exchange: call spread_experts"):
        balance_experts(model)
