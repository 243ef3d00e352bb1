"""Inputs of checkpointed blocks in host memory: the same bits, exact bytes, and what stays."""

import gc
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from models import Block
from ranks import on_ranks
from same_runs import assert_same, same_runs
from scenarios import NEEDS_TRANSFORMERS
from shardwise import Offload, accumulate, describe, shard
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, StateError
from shardwise.interop.fsdp2 import fully_shard
from shardwise.offload.activations import _OffloadedInput
from trainer import logged

AWAY = Offload(activations="cpu")
NUM_BLOCKS, ROWS, WIDTH = 5, 3, 8
INPUT_BYTES = ROWS * WIDTH * 4
ALL_BUT_THE_LAST = (NUM_BLOCKS - 1) * INPUT_BYTES


class Around(nn.Module):
    """A checkpoint around each block, which is a unit."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 5)

    def make_block(self):
        return Block()

    def run(self, number, x):
        return checkpoint(self.blocks[number], x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.embedding(x)
        for number in range(NUM_BLOCKS):
            x = self.run(number, x)
        return self.head(x)


class AroundReentrant(Around):
    reentrant = True


class Inside(Around):
    """A checkpoint inside each block's forward, as in transformers."""

    class Inner(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def make_block(self):
        return self.Inner()

    def run(self, number, x):
        return self.blocks[number](x)


class Wrapped(Inside):
    """torch's CheckpointWrapper around each block."""

    impl = CheckpointImpl.NO_REENTRANT

    def make_block(self):
        return Block()

    def __init__(self):
        super().__init__()
        apply_activation_checkpointing(
            self,
            checkpoint_wrapper_fn=lambda block: checkpoint_wrapper(block, self.impl),
            check_fn=lambda module: isinstance(module, Block),
        )


class WrappedReentrant(Wrapped):
    impl = CheckpointImpl.REENTRANT


class Nested(Around):
    """A checkpoint around two blocks, each in one of its own."""

    def run(self, number, x):
        def two(x):
            for each in (number, number - 1):
                x = checkpoint(self.blocks[each], x, use_reentrant=False)
            return x

        return checkpoint(two, x, use_reentrant=False)


KINDS = [Around, AroundReentrant, Inside, Wrapped, WrappedReentrant, Nested]
HOW = [
    {"stage": 3},
    {"stage": 1, "precision": "bf16"},
    {"stage": 2, "layout": "flat"},
    {"stage": 0, "precision": "fp16"},
]


def made(kind, offload, **options):
    torch.manual_seed(0)
    return shard(kind(), offload=offload, **options)


def batch(number, rows=ROWS):
    return torch.linspace(-1, number + 1, rows * WIDTH).view(rows, WIDTH)


def loss_of(model, number=0, rows=ROWS):
    return model(batch(number, rows)).float().square().mean()


def train(model, steps=2, micro_batches=2):
    """Return losses, gradients and parameters; every other step is a sum of losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(steps):
        if step % 2:
            losses = [loss_of(model, step + n) for n in range(micro_batches)]
            torch.stack(losses).sum().backward()
        else:
            losses = []
            for n in range(micro_batches):
                with accumulate(model, last=n == micro_batches - 1):
                    losses.append(loss_of(model, step + n))
                    losses[-1].backward()
        found += [loss.detach() for loss in losses]
        found += [p.grad.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.full_tensor().detach().clone() for p in model.parameters()]


def slots_of(model):
    """Return how many slots were ever made, how many are free now, and the bytes of all."""
    pool = engine_of(model).activations.pool
    return pool.num_made, pool.num_free, pool.num_bytes


@on_ranks(1, 3)
def test_training_has_the_bits_of_training_with_inputs_on_the_device(world_size):
    """Every kind on one rank, three of them on several."""

    def run(kind, how, state, away):
        model = made(kind, Offload(state, None, state, activations=away), **how)
        found = train(model)
        if away == "cpu":  # of two losses that are summed
            assert slots_of(model)[:2] == (2 * (NUM_BLOCKS - 1),) * 2
        return found

    for number, kind in enumerate(KINDS):
        if world_size > 1 and number not in (0, 3, 5):
            continue
        how, state = HOW[number % len(HOW)], ("cpu", "device")[number % 2]
        same_runs(partial(run, kind, how, state), ("device", "cpu"))


@on_ranks(1)
def test_all_inputs_but_the_last_are_in_host_memory_that_is_taken_once():
    model = made(Around, AWAY)
    assert "host memory so far" in str(describe(model)) and describe(model).activation_bytes == 0
    inputs = []

    def note(block, args):
        if not torch._C._current_graph_task_id() + 1:
            inputs.append(StorageWeakRef(args[0].untyped_storage()))

    for block in model.blocks:
        block.register_forward_pre_hook(note)
    gc.disable()  # what is given back only by it would take another slot
    try:
        for _ in range(3):
            inputs.clear()
            loss = loss_of(model)
            assert [each.expired() for each in inputs] == [True] * (NUM_BLOCKS - 1) + [False]
            assert slots_of(model) == (NUM_BLOCKS - 1, 0, ALL_BUT_THE_LAST)
            loss.backward()
            assert slots_of(model) == (NUM_BLOCKS - 1, NUM_BLOCKS - 1, ALL_BUT_THE_LAST)
            assert stats(model).bytes_by_place["host"] == ALL_BUT_THE_LAST
            assert describe(model).activation_bytes == ALL_BUT_THE_LAST
    finally:
        gc.enable()


@on_ranks(1)
def test_two_inputs_are_on_the_device_while_a_block_is_computed_again():
    model = made(Around, AWAY)
    fetched = []
    alive = []
    start = _OffloadedInput.start_fetch

    def noting(self):
        before = self._fetched
        start(self)
        if self._fetched is not before and self._fetched is not None:
            fetched.append(StorageWeakRef(self._fetched[0].untyped_storage()))

    def note(*_):
        if torch._C._current_graph_task_id() != -1:
            alive.append(sum(not each.expired() for each in fetched))

    for block in model.blocks:
        block.register_forward_pre_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_OffloadedInput, "start_fetch", noting)
        loss_of(model).backward()
    assert alive == [1, 2, 2, 2, 1]  # the last block's own was never away
    assert len(fetched) == NUM_BLOCKS - 1


@on_ranks(1)
def test_slots_grow_with_the_longest_inputs_and_hold_nothing_else():
    model = made(Around, AWAY)
    for rows, num_made, most in ((3, 1, 3), (2, 1, 3), (4, 2, 4), (1, 2, 4), (4, 2, 4)):
        loss_of(model, rows=rows).backward()
        num = NUM_BLOCKS - 1
        assert slots_of(model) == (num_made * num, num, most * num * WIDTH * 4)


class Staying(Around):
    """What more than one takes, what has no graph, and views of parameters; all by position."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.ones(2 * ROWS, WIDTH))
        self.mask = nn.Buffer(torch.ones(ROWS, WIDTH))

    def run(self, number, *args):
        block = self.blocks[number]
        return checkpoint(lambda *args: block(sum(args)), *args, use_reentrant=False)

    def forward(self, x):
        x = self.embedding(x)
        saved = torch.tanh(x)  # by its own operation too
        held, held_bits = self.queries[:ROWS], x.expand(2, ROWS, WIDTH)[0]
        first = self.run(0, saved, self.mask, held)
        for number in range(1, NUM_BLOCKS):
            first = self.run(number, first, self.mask, self.queries[:ROWS])
        return self.head(first + self.run(0, held_bits) + self.run(1, x))


@on_ranks(1, 2)
def test_what_others_hold_too_and_parameters_stay():
    same_runs(lambda offload: train(made(Staying, offload)), (None, AWAY))
    model = made(Staying, AWAY)
    loss = loss_of(model)
    # the inputs of blocks 1 to 4; what the last two take is one tensor, and stays
    assert slots_of(model)[:2] == (NUM_BLOCKS - 1, 0)
    assert stats(model).bytes_by_place["host"] == (NUM_BLOCKS - 1) * INPUT_BYTES
    loss.backward()


class Changing(Around):
    """Changes the input of block ``which`` in place, ``after`` blocks later."""

    which, after = 1, 0

    def forward(self, x):
        x = self.embedding(x)
        inputs = []
        for number in range(NUM_BLOCKS):
            inputs.append(x)
            x = self.run(number, x)
            if number == self.which + self.after:
                inputs[self.which].detach().add_(1)
        return self.head(x)


@on_ranks(1)
def test_an_input_that_is_changed_in_place_is_noticed_or_safe():
    kept = made(Around, None)
    loss_of(kept).backward()
    for after in range(3):
        model = made(type("Changes", (Changing,), {"after": after}), AWAY)
        loss = loss_of(model)
        if after < 2:  # on the device still, or being copied
            with pytest.raises(StateError, match="modified by an inplace operation"):
                loss.backward()
        else:  # torch would refuse, but what the block was given is safe
            loss.backward()
            grads = [[p.grad.full_tensor() for p in m.parameters()] for m in (model, kept)]
            assert_same(*grads)


@on_ranks(1)
def test_other_saved_tensors_that_are_changed_in_place_are_noticed():
    """What is no checkpoint's is checked as torch checks it."""

    class Changed(Around):
        def forward(self, x):
            x = torch.tanh(super().forward(x))
            x.detach().add_(1)
            return x

    for offload in (None, AWAY):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(made(Changed, offload)).backward()


def interrupt(*_):
    raise KeyboardInterrupt


@on_ranks(1)
def test_passes_that_do_not_train_or_fail_leave_nothing_behind():
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    seen = []
    model = made(Around, AWAY)
    handle = model.head.register_forward_pre_hook(lambda *_: seen.append(hooks(True)))
    with torch.no_grad():
        model(batch(0))
    assert seen == [None] and slots_of(model) == (0, 0, 0)
    model(batch(0))
    assert seen[1] is not None and hooks(True) is None
    handle.remove()
    handle = model.blocks[3].up.register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loss_of(model)
        assert hooks(True) is None
    handle.remove()
    handle = model.blocks[3].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model)  # torch calls no hooks then
    handle.remove()
    loss_of(model).backward()
    assert hooks(True) is None
    gc.collect()
    num_made, num_free, _ = slots_of(model)
    assert num_made == num_free  # of graphs that were never run backward
    with logged() as texts, torch.autograd.graph.save_on_cpu():
        loss_of(model).backward()
        loss_of(model).backward()
    assert [text for text in texts if "other hooks on saved tensors" in text] == texts
    assert len(texts) == 1 and slots_of(model)[0] == num_made


@on_ranks(1)
def test_a_model_without_checkpoints_is_told_so_once():
    class Plain(Inside):
        def make_block(self):
            return Block()

    with logged() as texts:
        loss_of(made(Plain, AWAY)).backward()
    assert [text for text in texts if "turn activation checkpointing on" in text] == texts
    assert len(texts) == 1


@on_ranks(1)
def test_graphs_that_are_kept_run_again():
    def run(offload):
        model = made(Around, offload, stage=2)
        x = batch(0).requires_grad_()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        other = model(x).square().mean()
        (grad,) = torch.autograd.grad(other, x, create_graph=True)
        grad.square().sum().backward()
        return [x.grad, *(p.grad.full_tensor() for p in model.parameters())]

    same_runs(run, (None, AWAY))


@on_ranks(1)
def test_autocast_has_the_same_bits():
    with torch.autocast("cpu", torch.bfloat16):
        same_runs(lambda offload: train(made(Around, offload)), (None, AWAY))


@on_ranks(1, 3)
def test_fully_shard_takes_them_as_an_offload_policy():
    whole = Offload("cpu", "cpu", "cpu", activations="cpu")

    def run(kind, policy):
        model = kind()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, **({} if policy is None else {"offload_policy": policy}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        for step in range(2):
            loss = loss_of(model, step)
            loss.backward()
            found += [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(policy, Offload):
                assert slots_of(model)[2] == ALL_BUT_THE_LAST
        return found

    for kind in (Around, Inside):
        same_runs(partial(run, kind), (None, AWAY, CPUOffloadPolicy(), whole))
    with pytest.raises(ConfigError, match="activations='nvme:/a'"):
        fully_shard(Block(), offload_policy=Offload(activations="nvme:/a"))
    with pytest.raises(ConfigError, match="all state of a rank in host memory, and"):
        fully_shard(Block(), offload_policy=Offload(optimizer="cpu", activations="cpu"))
    with pytest.raises(ConfigError, match="steps it there, or none"):
        fully_shard(Block(), offload_policy=Offload("cpu", "cpu", "cpu", step_on="device"))


@on_ranks(1)
def test_micro_batches_in_flight_have_a_place_each():
    """GPipe runs all forward passes first; each has its own place on the host."""

    def run(offload):
        model = made(Around, offload)
        schedule = ScheduleGPipe(
            PipelineStage(model, 0, 1, torch.device("cpu")),
            3,
            loss_fn=lambda y, target: (y - target).square().mean(),
        )
        for _ in range(2):
            model.zero_grad()
            schedule.step(batch(0, 3 * ROWS), target=torch.ones(3 * ROWS, 5))
        if offload is not None:
            assert slots_of(model) == (*[3 * (NUM_BLOCKS - 1)] * 2, 3 * ALL_BUT_THE_LAST)
        return [p.grad.full_tensor() for p in model.parameters()]

    same_runs(run, (None, AWAY))


@NEEDS_TRANSFORMERS
@on_ranks(1)
def test_layers_of_transformers_with_gradient_checkpointing():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    tokens = torch.arange(2 * 6).view(2, 6)

    def run(reentrant, trains_all, offload):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        name = "activation_checkpointing_enable"  # and of transformers 4 the other
        enable = getattr(model, name, model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        if not trains_all:
            model.model.embed_tokens.requires_grad_(False)
            model.enable_input_require_grads()
        model = shard(model.train(), offload=offload)
        found = []
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            found.append(loss.detach())
        if offload is not None:
            away = 4 - 1 if trains_all else 4 - 2
            assert slots_of(model)[2] == away * tokens.numel() * 16 * 4
        return found + [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]

    for reentrant, trains_all in itertools.product((False, True), (False, True)):
        same_runs(partial(run, reentrant, trains_all), (None, AWAY))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::torch", "ignore::DeprecationWarning")
@on_ranks(1)
def test_compiled_blocks_are_not_compiled_again():
    def run(offload):
        torch._dynamo.reset()
        model = made(Around, offload)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=False)
        found = train(model)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train(model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
        assert offload is None or slots_of(model)[0] == 2 * (NUM_BLOCKS - 1)
        return found

    same_runs(run, (None, AWAY))
