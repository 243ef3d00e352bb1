"""accelerate's loop on a sharded model: the steps, the files and the errors of the same loop."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from launched import launched
from models import Stack
from oracle import assert_same_bits
from programs import run_as_in_the_gallery
from ranks import on_ranks, run_ranks
from shardwise import gathered, shard
from shardwise.config import Schedule
from shardwise.errors import CheckpointError, ConfigError, StateError
from trainer import full_parameters, sharded_by_block

accelerate = pytest.importorskip("accelerate", reason="accelerate is in the test extra")
ours = importlib.import_module("shardwise.interop.accelerate")

# Importing accelerate pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BY_CALLS = {"by": "fully_shard"}  # instead of shard()'s options
# Stages 2 and 3 sum over ranks first where micro-batches are many; DDP sums over micro-batches.
SETTINGS = [{"stage": stage, "schedule": Schedule(reduce_every="step")} for stage in range(4)]


class Dropping(Stack):
    """A Stack with dropout, so that a resumed run needs its random generators back."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.25, self.training))


def sharded(model, options):
    """Shard by ``shard(**options)``, or by calls of fully_shard on units and model."""
    return sharded_by_block(model) if options == BY_CALLS else shard(model, **options)


class Run:
    """What a user's script has after ``prepare``; ``steps()`` is its loop."""

    def __init__(self, accelerator, options, clip=None):
        torch.manual_seed(0)
        plain = Dropping()
        if options is not None:
            sharded(plain, options)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        random = torch.Generator().manual_seed(1)
        data = TensorDataset(*(torch.randn(22, n, generator=random) for n in (8, 5)))
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=random)
        self.plain, self.clip, self.accelerator = plain, clip, accelerator
        self.model, self.optimizer, self.loader, self.schedule = accelerator.prepare(
            plain, optimizer, loader, schedule
        )
        torch.manual_seed(accelerator.process_index)  # each rank drops what it likes

    def steps(self):
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                self.accelerator.backward(loss)
                if self.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            yield loss.item()

    def evaluate(self):
        """Return every sample's error, without those that fill up the last batch."""
        self.model.eval()
        errors = []
        with torch.no_grad():
            for x, y in self.loader:
                found = (self.model(x) - y).square().mean(1)
                errors.append(self.accelerator.gather_for_metrics(found))
        self.model.train()
        return torch.cat(errors)

    def parameters(self):
        return full_parameters(self.plain)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@on_ranks(2)
def test_accelerates_loop_takes_the_steps_of_ddp_with_a_window_and_gathers_its_metrics(
    rank, world_size, mixed_precision
):
    with launched(rank, world_size):
        options = {"cpu": True, "gradient_accumulation_steps": 2}
        stock = accelerate.Accelerator(mixed_precision=mixed_precision, **options)
        truth = Run(stock, None)
        assert isinstance(truth.model, DistributedDataParallel)
        losses, errors = list(truth.steps()), truth.evaluate()
        assert len(losses) == 6 and len(errors) == 22  # the last window is half a window
        for setting in SETTINGS:
            accelerator = ours.Accelerator(mixed_precision=mixed_precision, **options)
            run = Run(accelerator, setting)
            assert run.model is run.plain
            assert accelerator.unwrap_model(run.model) is run.plain
            assert list(run.steps()) == losses, setting
            assert_same_bits(run.parameters(), truth.parameters())
            assert torch.equal(run.evaluate(), errors)
            assert run.schedule.get_last_lr() == truth.schedule.get_last_lr()
        accelerator = ours.Accelerator(mixed_precision=mixed_precision, **options)
        third = Run(accelerator, {"stage": 3})
        losses = list(third.steps())
        by_calls = Run(accelerator, BY_CALLS)
        assert accelerator.unwrap_model(by_calls.model) is by_calls.model is by_calls.plain
        assert list(by_calls.steps()) == losses
        assert_same_bits(by_calls.parameters(), third.parameters())
        assert torch.equal(by_calls.evaluate(), third.evaluate())


@pytest.mark.filterwarnings("ignore:::torch")  # of torch's compiler
@on_ranks(2)
def test_a_model_that_accelerate_compiles_is_prepared_saved_and_loaded(rank, world_size, tmp_path):
    folder = str(tmp_path)
    options = {"cpu": True, "gradient_accumulation_steps": 2}
    with launched(rank, world_size):
        losses = list(Run(ours.Accelerator(**options), {"stage": 1}).steps())
        by_calls = list(Run(ours.Accelerator(**options), BY_CALLS).steps())
    with launched(rank, world_size):
        run = Run(ours.Accelerator(dynamo_backend="eager", **options), BY_CALLS)
        assert isinstance(run.model, torch._dynamo.OptimizedModule)
        assert list(run.steps()) == by_calls
    with launched(rank, world_size):
        accelerator = ours.Accelerator(dynamo_backend="eager", **options)
        run = Run(accelerator, {"stage": 1})
        assert isinstance(run.model, torch._dynamo.OptimizedModule)
        assert list(run.steps()) == losses
        expected = run.parameters()
        accelerator.save_state(folder)
        list(run.steps())
        accelerator.load_state(folder)
        assert_same_bits(run.parameters(), expected)
        state = accelerator.get_state_dict(run.model)
        assert state.keys() == (run.plain.state_dict().keys() if rank == 0 else set())


@on_ranks(2)
def test_clipping_by_accelerate_is_clipping_by_torch(rank, world_size):
    """The norm has another order of additions than DDP's, so the oracle is our own plain loop."""
    with launched(rank, world_size):
        for stage in (0, 3):
            run = Run(ours.Accelerator(cpu=True), {"stage": stage}, clip=0.1)
            losses = list(run.steps())
            same = Run(ours.Accelerator(cpu=True), {"stage": stage})
            optimizer, clipped = torch.optim.AdamW(same.plain.parameters(), lr=1e-2), []
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for number, (x, y) in enumerate(same.loader):
                loss = (same.plain(x) - y).square().mean()
                loss.backward()
                clipped.append(torch.nn.utils.clip_grad_norm_(same.plain.parameters(), 0.1) > 0.1)
                optimizer.step()
                schedule.step()  # accelerate steps its own once per rank, and two of those halve
                optimizer.zero_grad()
                assert loss.item() == losses[number]
            assert all(clipped)
            assert_same_bits(run.parameters(), same.parameters())
        other = Run(ours.Accelerator(cpu=True), BY_CALLS, clip=0.1)
        assert list(other.steps()) == losses
        assert_same_bits(other.parameters(), run.parameters())


def resume(rank, world_size, folder, first):
    """Go on from a state of step 3 of another run, with the steps of one that never stopped."""
    with launched(rank, world_size):
        project = accelerate.utils.ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
        )
        options = {"cpu": True, "project_config": project}
        saved = []
        accelerator = ours.Accelerator(**options)
        run, beside = Run(accelerator, first), Run(accelerator, None)
        steps, others = run.steps(), beside.steps()
        for _ in range(3):
            next(steps), next(others)
        accelerator.save_state()
        seen = torch.rand(3)
        saved += [run.parameters(), beside.parameters()]
        losses = list(run.steps())
        accelerate.state.GradientState._reset_state()
        for options_of_run in ({"stage": 3}, {"stage": 1, "layout": "flat"}, BY_CALLS):
            accelerator = ours.Accelerator(**options)
            again, beside_again = Run(accelerator, options_of_run), Run(accelerator, None)
            next(again.steps())  # so that there is state of an optimizer to be replaced
            accelerator.load_state()
            assert torch.equal(torch.rand(3), seen)
            assert_same_bits(again.parameters(), saved[0])
            assert_same_bits(beside_again.parameters(), saved[1])
            assert list(again.steps()) == losses
            assert_same_bits(again.parameters(), run.parameters())
        return saved


def load_on_other_ranks(rank, world_size, folder, saved, how):
    with launched(rank, world_size):
        accelerator = ours.Accelerator(cpu=True)
        run, beside = Run(accelerator, how), Run(accelerator, None)
        accelerator.load_state(str(Path(folder, "checkpoints", "checkpoint_0")))
        assert_same_bits(run.parameters(), saved[0])
        assert_same_bits(beside.parameters(), saved[1])


@pytest.mark.parametrize("first", [{"stage": 3}, BY_CALLS])
def test_a_saved_state_is_resumed_to_the_bit_and_loads_on_other_ranks(tmp_path, first):
    saved = run_ranks(resume, 2, str(tmp_path), first)[0]
    run_ranks(load_on_other_ranks, 1, str(tmp_path), saved, BY_CALLS)
    if first == BY_CALLS:
        run_ranks(load_on_other_ranks, 3, str(tmp_path), saved, {"stage": 3})


class Tied(nn.Module):
    """Two names of one parameter, a frozen one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return self.second(self.first(x)) * self.scale[0]


@pytest.mark.parametrize("how", [{"stage": 3}, BY_CALLS])
@on_ranks(2)
def test_save_model_writes_the_whole_model_in_accelerates_files(rank, world_size, tmp_path, how):
    with launched(rank, world_size):
        accelerator = ours.Accelerator(cpu=True)
        torch.manual_seed(0)
        model = accelerator.prepare(sharded(Tied(), how))
        with gathered(model):
            expected = {k: v.clone() for k, v in model.state_dict().items()}
        state = accelerator.get_state_dict(model)
        if rank == 0:
            assert_same_bits(state, expected)
            assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr()
        else:
            assert state == {}
        accelerator.save_model(model, str(tmp_path), max_shard_size=150)
        accelerator.wait_for_everyone()
        assert len(list(tmp_path.glob("*.safetensors"))) == 2
        torch.manual_seed(5)
        other = Tied()
        accelerate.load_checkpoint_in_model(other, str(tmp_path))
        assert_same_bits(other.state_dict(), expected)


@on_ranks(2)
def test_a_save_that_is_refused_in_a_window_touches_no_file(rank, world_size, tmp_path):
    """The refused call deletes nothing and leaves nothing in the way of the next ones."""
    folder = str(tmp_path)
    with launched(rank, world_size):
        project = accelerate.utils.ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=1
        )
        accelerator = ours.Accelerator(
            cpu=True, gradient_accumulation_steps=2, project_config=project
        )
        run = Run(accelerator, {"stage": 3, "schedule": Schedule(reduce_every="step")})
        checkpoints = Path(folder, "checkpoints")
        accelerator.save_state()
        steps = run.steps()
        for expected in (["checkpoint_0"], ["checkpoint_1"]):
            next(steps)
            with pytest.raises(StateError, match="window"):
                accelerator.save_state()
            accelerator.wait_for_everyone()
            assert [path.name for path in checkpoints.iterdir()] == expected
            next(steps)
            accelerator.save_state()
            accelerator.wait_for_everyone()


@on_ranks(2)
def test_a_folder_that_one_rank_does_not_have_is_refused_on_all_ranks(rank, world_size, tmp_path):
    with launched(rank, world_size):
        project = accelerate.utils.ProjectConfiguration(
            project_dir=str(Path(tmp_path, str(rank))), automatic_checkpoint_naming=True
        )
        accelerator = ours.Accelerator(cpu=True, project_config=project)
        run = Run(accelerator, {"stage": 3})
        if rank == 0:
            Path(tmp_path, "0", "checkpoints", "checkpoint_0").mkdir(parents=True)
        for given in (str(Path(tmp_path, "0" if rank == 0 else "absent")), None):
            with pytest.raises(CheckpointError, match=r"rank 1: load_state: .*no saved state"):
                accelerator.load_state(given)
        assert len(set(run.steps())) > 1  # it goes on


@pytest.mark.parametrize("how", [{"stage": 3}, BY_CALLS])
@on_ranks(2)
def test_what_cannot_be_right_is_refused_with_the_remedy(rank, world_size, tmp_path, how):
    folder = str(tmp_path)
    with launched(rank, world_size):
        accelerator = ours.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Stack()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded(model, how)
        beside = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        for optimizer in (early, beside):
            with pytest.raises(ConfigError, match=r"no parameter of the SGD .* a call of its own"):
                accelerator.prepare(model, optimizer)
        accelerator.prepare(beside)
        with pytest.raises(ConfigError, match=r"a part of this Sequential is sharded"):
            accelerator.prepare(nn.Sequential(model))
        halves = list(model.parameters())
        two = [torch.optim.SGD(halves[:4], lr=0.1), torch.optim.SGD(halves[4:], lr=0.1)]
        model, *two = accelerator.prepare(model, *two)
        with pytest.raises(ConfigError, match="2 optimizers were prepared for one sharded"):
            accelerator.save_state(folder)
        assert accelerator._optimizers[-2:] == two  # what it hid meanwhile is back
        accelerator = ours.Accelerator(cpu=True)
        accelerator.prepare(shard(Stack(), stage=2))
        with pytest.raises(CheckpointError, match="shardwise"):
            accelerator.load_state(folder)

        whole = Stack()
        torchs_fully_shard(whole)
        accelerator = ours.Accelerator(cpu=True)
        with pytest.raises(ConfigError, match=r"Stack are DTensors, as torch's own fully_shard"):
            accelerator.prepare(whole)
        assert accelerator._models == []
        assert accelerator.prepare_model(whole, evaluation_mode=True) is whole

        accelerator.state.num_processes = 1  # as without cpu=True, where there is no GPU
        with pytest.raises(ConfigError, match=r"sees 1 processes.* over 2.*cpu=True"):
            accelerator.prepare(shard(Stack()))
        # As its config says on GPUs; accelerate has no FSDP on the CPU.
        accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        with pytest.raises(ConfigError, match=r"FSDP.* take FSDP"):
            accelerator.prepare(shard(Stack()))


@pytest.mark.slow
def test_the_example_learns_resumes_and_leaves_a_whole_model(tmp_path):
    out = run_as_in_the_gallery("accelerate_loop.py", "--folder", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[-1] < 0.01
    rates = [float(rate) for rate in re.findall(r"rate (\S+)", out)]
    assert rates == [3e-3, 1.5e-3, 1.5e-3, 7.5e-4]  # the schedule went on where it stopped
    assert (tmp_path / "whole" / "model.safetensors").exists()
