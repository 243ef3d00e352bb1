"""torch's own features on sharded models: compile, autocast, profiler, CUDA graphs, torch.func."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from models import Block, Checkpointed, Stack, stack_roundings
from oracle import assert_same_bits
from programs import run_program
from ranks import on_ranks, run_ranks
from roundings import assert_all_rounded_alike, assert_rounded_alike
from shardwise import gathered, shard
from shardwise.config import Schedule
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import StateError
from trainer import adamw, full_parameters, make_steps, mean_square, sgd, sharded_by_block, train

# torch's compiler and profiler warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore::DeprecationWarning")


def seeded(make=Stack):
    torch.manual_seed(0)
    return make()


# -- torch.compile


def compile_blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


def compile_in_place(model, backend):
    model.compile(backend=backend)
    return model


def shard_fully(model):
    return sharded_by_block(model)


def train_compiled(rank, steps, compiled_by, before, sharded):
    """Return losses, parameters, and how many frames had been compiled after each step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = seeded()
    called = compiled_by(model, counter) if before else model
    sharded(model)
    if not before:
        called = compiled_by(model, counter)
    optimizer = adamw(model.parameters())
    losses, num_frames = [], []
    for (by_rank,) in steps:
        loss = mean_square(called, by_rank[rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        num_frames.append(counter.frame_count)
    if sharded is not shard_fully:
        assert sharded is SHARDINGS[0] or stats(model).param_full_bytes == 0  # no graph keeps it
    return losses, full_parameters(model), num_frames


SHARDINGS = [partial(shard, stage=1), partial(shard, stage=3), shard_fully]


@pytest.mark.slow
@on_ranks(2)
def test_compiled_before_or_after_shard_is_the_same_and_compiled_once(rank, world_size):
    steps = make_steps(world_size, num_steps=4)
    for number, sharded in enumerate(SHARDINGS):
        losses, parameters, none = train_compiled(rank, steps, lambda m, _: m, True, sharded)
        assert not any(none)
        # Each way to compile comes before shard() as well as after it, with another sharding.
        ways = (compile_blocks, compile_whole, compile_in_place)
        for before, compiled_by in ((True, ways[number]), (False, ways[number - 1])):
            found = train_compiled(rank, steps, compiled_by, before, sharded)
            assert found[0] == losses
            assert_same_bits(found[1], parameters)
            # The first step compiles (blocks share their code); no later one does.
            assert found[2][0] > 0 and len(set(found[2])) == 1, (compiled_by, before, found[2])


@pytest.mark.slow
@on_ranks(2)
def test_blocks_compiled_by_inductor_train(world_size):
    """Inductor's kernels round as they like; SGD, by Note [Losses after steps of Adam]."""
    steps, runs = make_steps(world_size, 3), []
    for compiles in (False, True):
        model = seeded()
        for block in model.blocks if compiles else ():
            block.compile(backend="inductor")
        runs.append(train(model, steps, mean_square, sgd, stage=3))
    eager, compiled = runs
    roundings = stack_roundings(rows=2 * 3)
    for ours, theirs in zip(compiled.grads, eager.grads, strict=True):
        assert_all_rounded_alike(ours, theirs, roundings)
    assert_all_rounded_alike(compiled.parameters, eager.parameters, roundings)


class Generating(Stack):
    def generate(self):
        """Make the model one that ranks generate with in step."""


@pytest.mark.slow
@on_ranks(1)
def test_a_model_that_generates_is_compiled_but_for_our_hooks():
    """The hooks are why the graph of a function that calls the model is broken."""
    torch._dynamo.utils.counters.clear()
    model = shard(Generating(), stage=3)
    around = torch.compile(lambda batch: mean_square(model, batch), backend="eager")
    around(torch.ones(3, 8)).backward()
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    assert reasons and all("_Hooks" in reason for reason in reasons), reasons


@on_ranks(2)
def test_a_compiled_function_may_call_backward(rank):
    runs = []
    for compiles in (False, True):
        for sharded in (shard_fully, shard):
            torch._dynamo.reset()
            model = sharded(seeded())

            def run(batch, model=model):
                loss = mean_square(model, batch)
                loss.backward()
                return loss.detach()

            step = torch.compile(run, backend="eager") if compiles else run
            optimizer = sgd(model.parameters())
            losses = []
            for _ in range(2):
                losses.append(step(torch.ones(3, 8)).item())
                optimizer.step()
                optimizer.zero_grad()
            runs.append(losses)
    assert all(losses == runs[0] for losses in runs)


# -- torch.autocast


class Cast(Stack):
    """Has a part that opts out of autocast, and a buffer that keeps its dtype."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        x = super().forward(x) * self.scale.float()
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.head.weight.float().t().contiguous())


@on_ranks(2)
def test_a_region_of_autocast_over_several_passes_has_the_bits_of_ddp(rank, world_size):
    """One autocast region over several micro-batches, so that its cache of casts is used."""
    steps = make_steps(world_size, num_steps=3, num_micro_batches=2)
    for make in (Stack, Checkpointed, Cast):
        runs = []
        for options in (
            None,
            {"stage": 1},
            {"stage": 3, "schedule": Schedule(reduce_every="step")},
        ):
            model = seeded(make)
            called = shard(model, **options) if options else DistributedDataParallel(model)
            optimizer = adamw(called.parameters())
            losses = []
            for micro_batches in steps:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = torch.stack([mean_square(called, b[rank]) for b in micro_batches]).mean()
                loss.backward()
                losses.append(loss.item())
                if options and options["stage"] == 3:
                    held = stats(model).param_full_bytes
                    assert held == 0  # the casts are copies: what was cast is freed as ever
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(mean_square(called, steps[0][0][rank]).item())
            runs.append((losses, full_parameters(model)))
        assert runs[0][0] != sorted(runs[0][0])
        for losses, parameters in runs[1:]:
            assert losses == runs[0][0]
            assert_same_bits(parameters, runs[0][1])


# -- torch.profiler


def labels_of(profiler):
    """Return our labels in the order of their beginnings."""
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("shardwise.")]


def profile_step(rank, world_size, sharded):
    model = sharded(seeded(Checkpointed))
    optimizer = adamw(model.parameters())
    batch = torch.randn(3, 8)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        model(batch).square().mean().backward()
        optimizer.step()  # a profile ends when nothing is under way: gloo labels its collectives
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    if sharded is not shard_fully:
        assert engine_of(model).reductions.nbytes
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    with profile(activities=[ProfilerActivity.CPU]) as cut_short:
        model(batch)  # its backward pass never comes
    step()  # with no profiler: nothing is left open
    assert not any("backward" in label for label in labels_of(cut_short))
    for phase, work in (("backward", "AddmmBackward0"), ("forward", "aten::linear")):
        assert_between(profiler, f"shardwise.{phase}(blocks.1)", work)
    return labels_of(profiler)


def assert_between(profiler, label, work):
    """Check that work of a unit lies between the label and its ``_end``."""
    events = profiler.events()
    (begin,) = [e.time_range for e in events if e.name == label]
    (end,) = [e.time_range for e in events if e.name == label.replace("(", "_end(", 1)]
    inside = [e.time_range for e in events if work in e.name]
    assert any(begin.end <= t.start and t.end <= end.start for t in inside)


@pytest.mark.parametrize(
    "sharded", [partial(shard, schedule=Schedule(bucket_bytes=0)), shard_fully]
)
def test_a_profile_names_every_unit_in_every_phase(sharded):
    for labels in run_ranks(profile_step, 2, sharded):
        phases = {}
        for label in labels:
            phase, units = re.fullmatch(r"shardwise\.(\w+)\((.+)\)", label).groups()
            phases.setdefault(phase, set()).update(units.split(", "))
        units = {"(root)", "blocks.0", "blocks.1", "blocks.2"}
        once = ("forward", "forward_end", "backward", "backward_end")
        for phase in ("unshard", "wait_unshard", "reduce", "wait_reduce", *once):
            assert phases[phase] == units, (phase, phases)
        assert phases["recompute"] == phases["recompute_end"] == units - {"(root)"}
        for phase in once:
            assert labels.count(f"shardwise.{phase}(blocks.1)") == 1


CUT_SHORT = """
import gc
import torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from shardwise import shard, trace

num_open = 0

class Counted(record_function):
    def __enter__(self):
        global num_open
        num_open += 1
        return super().__enter__()

    def __exit__(self, *args):
        global num_open
        num_open -= 1
        return super().__exit__(*args)

trace.record_function = Counted

def profiled(**options):
    return profile(activities=[ProfilerActivity.CPU], **options)

def passed(pass_):
    try:
        pass_()
    except (ZeroDivisionError, KeyboardInterrupt):
        return
    raise SystemExit("it did not raise")

def fail(*_):
    assert not num_open, "the model's own code runs inside of a span"
    1 / 0

def interrupt(*_):
    assert not num_open
    raise KeyboardInterrupt

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
shard(model, units=[nn.Sequential])
x = torch.randn(3, 8)
raising = model[1][0].register_full_backward_hook(fail)
with profiled():
    passed(lambda: model(x).sum().backward())
raising.remove()
gc.collect()
for hook in (interrupt, fail):
    with profiled():
        raising = model[1].register_forward_pre_hook(hook)
        passed(lambda: model(x))
        raising.remove()
    with profiled() as second:
        model(x).sum().backward()
    gc.collect()
    assert [e.name for e in second.events()].count("shardwise.backward_end(1)") == 1
with profiled(schedule=schedule(wait=1, warmup=1, active=1)) as scheduled:
    for _ in range(6):
        loss = model(x).sum()
        scheduled.step()
        loss.backward()
late = profiled()
loss = model(x).sum()
late.start()
loss.backward()
late.stop()
del model, loss
gc.collect()
with profiled():
    x.sum()
gc.collect()
"""


def test_a_pass_that_is_cut_short_inside_a_profile_does_not_end_the_process(tmp_path):
    """torch ends a span by writing into its profile, which may be gone by then."""
    program = tmp_path / "cut_short.py"
    program.write_text(CUT_SHORT)
    done = run_program(program)
    assert done.returncode == 0, done.stderr


# -- torch.func


@on_ranks(2)
def test_torch_func_works_on_a_gathered_model():
    plain, model = seeded(), shard(seeded())
    batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    with gathered(model):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        for called in (
            lambda m: torch.func.functional_call(m, values, (batch,)),
            lambda m: torch.func.jacrev(lambda x: mean_square(m, x))(batch),
            lambda m: torch.func.vmap(m)(batch),
            lambda m: torch.func.grad(
                lambda p: torch.func.functional_call(m, p, (batch,)).square().mean()
            )(values)["blocks.0.up.weight"],
        ):
            assert torch.equal(called(model), called(plain))
    stacked, _ = torch.func.stack_module_state([model, model])
    for name, (first, second) in stacked.items():
        assert torch.equal(first, values[name]) and torch.equal(second, values[name])

    expected = plain(batch)
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(batch), torch.vmap(plain)(batch))
    with pytest.raises(StateError, match="freed before backward"):
        torch.vmap(model)(batch)
    assert torch.equal(model(batch), expected)
    keeps = shard(seeded(), stage=2)
    for of in (keeps, plain):
        torch.vmap(of)(batch).square().mean().backward()
    for ours, theirs in zip(keeps.parameters(), plain.parameters(), strict=True):
        grad = ours.grad.full_tensor()
        assert torch.equal(grad, theirs.grad)


# -- CUDA graphs


def train_with_graphs(rank, world_size, compiled):
    torch._dynamo.reset()
    model = shard(nn.Sequential(*(seeded(Block) for _ in range(3))).cuda())
    if compiled:
        for block in model:
            block.compile(mode="reduce-overhead", fullgraph=True)
    optimizer = sgd(model.parameters())  # Note [Losses after steps of Adam] in roundings.py
    random = torch.Generator().manual_seed(1)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        mean_square(model, torch.randn(64, 8, generator=random).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in full_parameters(model).items()}


def replay_gathered(rank, world_size):
    """A graph captured inside gathered() reads memory that stays; replays see new inputs."""
    model = shard(seeded().cuda())
    batch = torch.randn(3, 8, device="cuda")
    with gathered(model), torch.no_grad():
        model(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(batch)
        batch.copy_(torch.ones(3, 8))
        graph.replay()
        assert_rounded_alike(out, model(batch), stack_roundings(rows=3))


@pytest.mark.gpu
@on_ranks(1, fresh=True)
def test_cuda_graphs_of_compiled_blocks_and_of_a_gathered_model(rank, world_size):
    eager, graphs = (train_with_graphs(rank, world_size, c) for c in (False, True))
    assert_all_rounded_alike(graphs, eager, stack_roundings(rows=64))
    replay_gathered(rank, world_size)
