"""Calls of other libraries and swapped arguments: each error names what to write instead."""

import copy
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from ranks import on_ranks, run_ranks
from shardwise.errors import CheckpointError, CollectiveError, ConfigError, StateError
from shardwise.processes import describe_signal, fate, own_process
from test_hangs import beats, process_of, record, table_of


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def sharded(stage=3):
    return shardwise.shard(small(), stage=stage, units=[nn.Linear])


INSTEAD = {
    "backward": "loss.backward()",
    "clip_grad_norm_": "shardwise.parallel.clip_grad_norm_(model.parameters()",
    "load_checkpoint": "shardwise.load(path",
    "save_checkpoint": "shardwise.save(path",
    "step": "optimizer.step()",
    "summon_full_params": "shardwise.gathered(model)",
}


@on_ranks(1)
def test_methods_of_other_libraries_name_what_to_write_instead(rank, world_size):
    model = sharded()
    for module in (model, model[0]):
        for name, instead in INSTEAD.items():
            assert not hasattr(module, name)
            with pytest.raises(AttributeError) as caught:
                getattr(module, name)
            assert f"no attribute '{name}': " in str(caught.value) and instead in str(caught.value)
    with pytest.raises(AttributeError, match="accumulate"):
        model[0].no_sync  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'unknown'$"):
        model.unknown  # noqa: B018


@on_ranks(1, 2, fresh=True)
def test_a_capture_is_refused_and_the_model_runs_on_as_the_plain_copy_is_captured(rank, world_size):
    model, x = sharded(), torch.ones(2, 4)
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit
    captures = {
        "torch.jit.trace": lambda model: torch.jit.trace(model, x),
        "torch.export": lambda model: torch.export.export(model, (x,)).module(),
        "torch.jit.script": torch.jit.script,
    }
    for name, capture in captures.items():
        with pytest.raises(StateError, match=f"^{name} of a sharded model.*shardwise.gathered"):
            capture(model)
        out = model(x)
        out.sum().backward()
        with shardwise.gathered(model):
            plain = copy.deepcopy(model)
        assert torch.equal(capture(plain)(x), out), name


@on_ranks(1)
def test_fully_shard_after_shard_is_refused_and_the_model_runs_on(rank, world_size):
    model = sharded()
    for function in (torch.distributed.fsdp.fully_shard, shardwise.fully_shard):
        for module in (model, model[0]):
            with pytest.raises((StateError, ConfigError), match=r"shard\(\)"):
                function(module)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match=r"call one of the two"):
        torch.distributed.fsdp.fully_shard(copied)


@on_ranks(1)
def test_a_model_wrapped_by_fsdp1_is_refused(rank, world_size):
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it asks for a device
    nn.Module.__init__(wrapped)
    wrapped.inner = nn.Linear(2, 2)
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(ConfigError, match="wrapped in FullyShardedDataParallel"):
            shardwise.shard(model)


def state_dict_of(model):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


def summoned(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return list(model.parameters())


def part_of(function):
    def make():
        model = small()
        function(model[0])
        return model

    return make


WRAPPED = {
    "DDP": (DistributedDataParallel, "Use the model without this wrapper"),
    "FSDP1": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "Use the model without this wrapper",
    ),
    "state_dict_type": (state_dict_of, "shardwise.gathered"),
    "set_state_dict_type": (
        lambda model: FullyShardedDataParallel.set_state_dict_type(
            model, StateDictType.FULL_STATE_DICT
        ),
        "shardwise.gathered",
    ),
    "summon_full_params": (summoned, "shardwise.gathered"),
    "optim_state_dict": (
        lambda model: FullyShardedDataParallel.optim_state_dict(
            model, torch.optim.SGD(model.parameters())
        ),
        "shardwise.save",
    ),
    "fully_shard": (torchs_fully_shard, "fully_shard"),
    "replicate": (replicate, "shard"),
}
SHARDED = {
    "shard": sharded,
    "shard at stage 0": lambda: sharded(stage=0),
    "fully_shard": lambda: shardwise.fully_shard(part_of(shardwise.fully_shard)()),
    "a part by shard": part_of(shardwise.shard),
    "a part by fully_shard": part_of(shardwise.fully_shard),
}


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(2)
def test_wrappers_of_torch_refuse_a_sharded_model_before_they_change_it(rank, kind):
    model, is_part = SHARDED[kind](), "part" in kind
    names = [name for name, _ in model.named_parameters()]
    for name, (wrap, instead) in WRAPPED.items():
        if name == "replicate" and is_part:
            continue  # replicates the rest
        with pytest.raises(Exception, match=instead) as caught:
            wrap(model)
        is_torchs = kind == "fully_shard" and name in ("fully_shard", "replicate")
        assert is_torchs or isinstance(caught.value, ConfigError | StateError), name
        assert [name for name, _ in model.named_parameters()] == names
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_wrappers_of_torch_take_plain_models_and_copies_that_are_whole(rank):
    model, x = sharded(), torch.ones(2, 4)
    with shardwise.gathered(model):
        plain = copy.deepcopy(model)
    expected = model(x)
    for wrapped in (DistributedDataParallel(plain), torchs_fully_shard(copy.deepcopy(plain))):
        assert torch.equal(wrapped(x), expected)


@on_ranks(2)
def test_ddp_around_a_sharded_part_that_it_ignores_averages_the_rest(rank):
    model = part_of(shardwise.shard)()
    names = [name for name, _ in model[0].named_parameters(prefix="0")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        wrapped(torch.full((2, 4), float(rank))).sum().backward()
    whole = [model[2].weight.grad.clone() for _ in range(2)]
    torch.distributed.broadcast(whole[1], 0)
    assert torch.equal(*whole)


class Distilled(nn.Module):
    """A plain student beside a frozen teacher that is sharded."""

    def __init__(self, stage):
        super().__init__()
        self.teacher = sharded(stage=stage).requires_grad_(False)
        self.student = nn.Linear(4, 4)

    def forward(self, x):
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_ddp_takes_a_frozen_sharded_teacher(rank, stage):
    torch.manual_seed(1)
    model = Distilled(stage)
    expected = model(torch.ones(2, 4))
    wrapped = DistributedDataParallel(model)
    assert torch.equal(wrapped(torch.ones(2, 4)), expected)
    wrapped(torch.full((2, 4), float(rank))).sum().backward()
    assert torch.equal(model.student.weight.grad, torch.ones(4, 4))  # the mean of 0 and 2


@on_ranks(2)
def test_ddp_takes_a_copy_of_a_submodule_made_inside_of_gathered(rank):
    model = sharded()
    with shardwise.gathered(model):
        part = copy.deepcopy(model[0])
    assert DistributedDataParallel(part)(torch.ones(2, 4)).shape[0] == 2


@on_ranks(1)
def test_functions_of_fsdp1_take_their_arguments_by_name(rank):
    sharded()  # torch's functions look for sharded models from here on
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for function in ("optim_state_dict", "optim_state_dict_to_load"):
        options = {"optim_state_dict": optimizer.state_dict()} if "load" in function else {}
        with pytest.raises(AttributeError, match="_"):  # of a model without FSDP1 in it
            getattr(FullyShardedDataParallel, function)(model=plain, optim=optimizer, **options)


@on_ranks(1)
def test_fully_shard_over_parts_of_torchs_fully_shard_is_refused(rank):
    with pytest.raises(ConfigError, match=r"torch's fully_shard\(\) was called on modules of it"):
        shardwise.fully_shard(part_of(torchs_fully_shard)())


@on_ranks(1, 2)
def test_paths_that_are_models_or_files_are_clear(rank, world_size, tmp_path):
    model, file = sharded(), tmp_path / "file"
    file.touch()
    for call in (shardwise.save, shardwise.load, shardwise.Checkpoints):
        with pytest.raises(ConfigError, match=r"got Sequential; the path comes first: shardwise\."):
            call(model, file)
    for call in (
        lambda: shardwise.save(file / "step", model),
        lambda: shardwise.load(file, model),
        lambda: shardwise.Checkpoints(file, model),
    ):
        with pytest.raises(CheckpointError, match="a checkpoint is a folder, and there is a file"):
            call()
    if world_size > 1:
        with pytest.raises(ConfigError, match="the ranks differ in the folder"):
            shardwise.save(tmp_path / str(rank), model)
    shardwise.save(tmp_path / "whole", model)


@on_ranks(2)
def test_gradients_of_own_batches_are_refused_by_what_differs(rank, world_size):
    def make():
        torch.manual_seed(0)
        return small()

    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    shardwise.check.gradients(make, (batch,))
    with pytest.raises(ConfigError, match="the ranks have different batches; give every rank the"):
        shardwise.check.gradients(make, (batch + rank,))


def shard_alone(rank, world_size):
    if rank:
        return ""
    with pytest.raises(CollectiveError) as caught:
        shardwise.shard(small())
    return str(caught.value)


def test_a_rank_that_shards_alone_reads_that_the_other_made_no_call():
    text = run_ranks(shard_alone, 2, fresh=True)[0]
    assert "rank 1 closed the connection and made no call of Shardwise" in text, text


# -- how a process has ended
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(3)", "it ended with exit code 3 and no error in Python"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "gloo does to a rank that is sent more"),
    ],
)
def test_a_rank_that_has_ended_is_described_by_its_exit_code_or_signal(code, said):
    code = f"import os, signal; os.read(0, 1); {code}"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    process = process_of(child.pid, own_process())
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert fate(process, own_process())[0] == "dead"
    assert said in table_of(record(), _1=beats(process=process)).describe()
    torch_call = table_of(record(number=0), _1=beats(process=process)).describe()
    assert ("another shape or dtype" in torch_call) is ("SIGABRT" in code)
    child.wait()
    assert "SIGABRT" in table_of(record(number=0), _1=beats(process=process)).describe()


def test_signals_of_ranks_are_told_apart():
    assert "crashed with SIGSEGV" in describe_signal(signal.SIGSEGV)
    assert "ran out of memory" in describe_signal(signal.SIGKILL)
    assert describe_signal(signal.SIGTERM).startswith("was killed by SIGTERM (often: a launcher")
    assert describe_signal(signal.SIGUSR1) == "was killed by SIGUSR1"
    assert describe_signal(40) == "was killed by signal 40"
