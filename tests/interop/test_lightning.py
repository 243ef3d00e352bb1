"""A Lightning Trainer with strategy="shardwise" takes the steps that it takes with "ddp"."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from launched import launched
from models import Block
from oracle import assert_same_bits
from programs import run_as_in_the_gallery
from ranks import on_ranks
from shardwise import Precision, fully_shard, gathered, save, shard
from shardwise.config import Schedule
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, ShardError
from shardwise.interop.lightning import ShardwiseStrategy
from trainer import full_parameters, sharded_by_block

# Lightning advises on workers, log intervals, batch sizes; some of its imports are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES, BATCH = 24, 2


class Regression(L.LightningModule):
    """Units, a parameter of the module's own, dropout, a schedule, and metrics over ranks."""

    def __init__(self, dropout=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.dropout = nn.Dropout(dropout)
        self.seen = []

    def loss(self, batch):
        x, y = batch
        for block in self.blocks:
            x = self.dropout(block(x))
        return (self.head(x) * self.scale - y).square().mean()

    def training_step(self, batch, number):
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("validation", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


class Normed(Regression):
    """Has statistics of batches, which are no parameters."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.norm = nn.BatchNorm1d(8)

    def loss(self, batch):
        return super().loss([self.norm(batch[0]), batch[1]])


class TwoNetworks(L.LightningModule):
    """Manual optimization: two networks, each with its optimizer, in one step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.seen = []

    def training_step(self, batch, number):
        optimizers = self.optimizers()
        for optimizer, sign in zip(optimizers, (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.critic(self.generator(batch[0])).mean()
            self.seen.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]


class VectorScale(Regression):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))  # fully_shard takes no scalars


class ByCalls(VectorScale):
    """Shards itself by fully_shard in configure_model, units first."""

    def configure_model(self):
        if not isinstance(self.blocks[0], FSDPModule):
            sharded_by_block(self)


class InsideByCalls(TwoNetworks):
    """Gives the networks that it has to fully_shard, and not itself."""

    def configure_model(self):
        for network in (self.generator, self.critic):
            if not isinstance(network, FSDPModule):
                fully_shard(network)


class Late(Regression):
    """Makes its layers in configure_model, without memory."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.blocks = nn.ModuleList()

    def configure_model(self):
        if not self.blocks:
            with torch.device("meta"):
                self.blocks.extend(Block() for _ in range(2))


def loader(batch_size=BATCH):
    random = torch.Generator().manual_seed(3)
    x, y = (torch.randn(NUM_SAMPLES, n, generator=random) for n in (8, 3))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(strategy, world_size, max_epochs=2, **options):
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=max_epochs,
        **{
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


def fit(strategy, rank, world_size, make=Regression, ckpt_path=None, **options):
    module = make()
    torch.manual_seed(10 + rank)  # each rank draws dropout masks of its own
    fitted = trainer(strategy, world_size, **options)
    fitted.fit(module, loader(), loader(4), ckpt_path=ckpt_path)
    return module, fitted


def assert_same_fit(ours, theirs):
    assert ours[0].seen == theirs[0].seen
    assert ours[1].callback_metrics == theirs[1].callback_metrics
    assert_same_bits(full_parameters(ours[0]), full_parameters(theirs[0]))


def other_settings():
    """Return what differs from stage 3: the error, the strategy, the Trainer's options."""
    return [
        (r"stage=1\): .* before with 3,", "shardwise_stage_1", {}),
        ("layout='flat'", ShardwiseStrategy(layout="flat"), {}),
        ("bytes=9", ShardwiseStrategy(schedule=Schedule(prefetch_bytes=9)), {}),
        ("precision='bf16-mixed'", "shardwise", {"precision": "bf16-mixed"}),
        ("'64-true'.*torch.float32", "shardwise", {"precision": "64-true"}),
    ]


def refuse_settings(module, world_size, cases):
    for wanted, strategy, options in cases:
        with pytest.raises(ConfigError, match=wanted):
            trainer(strategy, world_size, **options).fit(module, loader())


@on_ranks(2)
def test_what_configure_model_gave_to_fully_shard_takes_the_same_steps_and_checkpoints(
    rank, world_size, tmp_path
):
    """Calls of fully_shard in configure_model, on the module or on its networks alone."""
    with launched(rank, world_size):
        for make, plain_one in ((ByCalls, VectorScale), (InsideByCalls, TwoNetworks)):
            options = {"accumulate_grad_batches": 2 if make is ByCalls else 1}
            plain = fit("shardwise", rank, world_size, plain_one, max_epochs=2, **options)
            whole = fit("shardwise", rank, world_size, make, max_epochs=2, **options)
            assert whole[0].seen == plain[0].seen
            assert_same_bits(full_parameters(whole[0]), full_parameters(plain[0]))
            assert all(isinstance(p, DTensor) for p in whole[0].state_dict().values())
            pairs = (make, plain_one), (plain_one, make)
            if make is InsideByCalls:  # several optimizers of a module
                pairs = (make, make), (plain_one, plain_one)
            for first, second in pairs:
                half, ended = fit("shardwise", rank, world_size, first, max_epochs=1, **options)
                path = tmp_path / f"{first.__name__}.ckpt"
                ended.save_checkpoint(path)
                options |= {"max_epochs": 2}
                rest, _ = fit("shardwise", rank, world_size, second, ckpt_path=path, **options)
                assert half.seen + rest.seen == plain[0].seen
                assert_same_bits(full_parameters(rest), full_parameters(plain[0]))
                options.pop("max_epochs")
        _, ended = fit("ddp", rank, world_size, VectorScale, max_epochs=1)
        ended.save_checkpoint(tmp_path / "ddp.ckpt")
        path = tmp_path / "ddp.ckpt"
        plain = fit("shardwise", rank, world_size, VectorScale, ckpt_path=path)
        again = fit("shardwise", rank, world_size, ByCalls, ckpt_path=path)
        assert again[0].seen == plain[0].seen
        refuse_settings(again[0], world_size, other_settings())


@on_ranks(1, 2)
def test_every_stage_takes_the_steps_of_ddp(rank, world_size):
    with launched(rank, world_size):
        plain = fit("ddp", rank, world_size)
        assert len(set(plain[0].seen)) > 10
        others = [] if world_size == 1 else ["shardwise", "shardwise_stage_1", "shardwise_stage_2"]
        last = ShardwiseStrategy(stage=3, layout="flat", units=[Block])
        for strategy in (*others, "shardwise_stage_0", last):
            sharded = fit(strategy, rank, world_size)
            assert_same_fit(sharded, plain)
        assert [u.name for u in engine_of(sharded[0]).units] == ["", "blocks.0", "blocks.1"]
        windows = fit("ddp", rank, world_size, accumulate_grad_batches=4)
        for strategy in (
            "shardwise_stage_1",
            ShardwiseStrategy(schedule=Schedule(reduce_every="step")),
        ):
            sharded = fit(strategy, rank, world_size, accumulate_grad_batches=4)
            assert_same_fit(sharded, windows)
        manual = fit("ddp_find_unused_parameters_true", rank, world_size, TwoNetworks)
        assert_same_fit(fit("shardwise", rank, world_size, TwoNetworks), manual)


class WholeMatrices(Regression):
    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])


class Recording(Regression):
    """Keeps the batches of its steps."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.batches = []

    def on_train_batch_start(self, batch, number):
        self.batches.append(batch)


@on_ranks(2)
def test_clipping_by_norm_is_that_of_the_whole_gradient(rank, world_size):
    """The same steps by hand, on the batches that Lightning's sampler gave this rank."""
    options = {"max_epochs": 1, "gradient_clip_val": 0.1}
    with launched(rank, world_size):
        module, _ = fit("shardwise", rank, world_size, Recording, **options)
    by_hand = Recording()
    shard(by_hand)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2)
    norms = []
    for batch in module.batches:
        optimizer.zero_grad()
        by_hand.loss(batch).backward()
        norms.append(nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1).item())
        optimizer.step()
    assert len(norms) == 6 and min(norms) > 0.1
    assert_same_bits(full_parameters(module), full_parameters(by_hand))


def check_best(rank, world_size, keep):
    """A Trainer that has not fitted loads the best checkpoint's parameters alone."""
    module = Regression()
    (metrics,) = trainer("shardwise", world_size).test(
        module, loader(4), ckpt_path=keep.best_model_path, verbose=False
    )
    assert metrics["validation"] == keep.best_model_score


@on_ranks(2)
def test_a_resumed_fit_goes_on_to_the_bit(rank, world_size, tmp_path):
    with launched(rank, world_size):
        whole, _ = fit("shardwise", rank, world_size, max_epochs=4)
        keep = ModelCheckpoint(
            tmp_path / "kept", monitor="validation", save_last=True, save_top_k=1
        )
        options = {"callbacks": [keep], "enable_checkpointing": True}
        first, _ = fit("shardwise", rank, world_size, max_epochs=2, **options)
        assert {p.name for p in (tmp_path / "kept").iterdir()} == {
            Path(keep.best_model_path).name,
            "last.ckpt",
        }
        for strategy in ("shardwise", "shardwise_stage_1"):
            last = tmp_path / "kept" / "last.ckpt"
            second, _ = fit(strategy, rank, world_size, max_epochs=4, ckpt_path=last)
            assert first.seen + second.seen == whole.seen
            assert_same_bits(full_parameters(second), full_parameters(whole))
        check_best(rank, world_size, keep)

        plain, ended = fit("ddp", rank, world_size)
        ended.save_checkpoint(tmp_path / "ddp.ckpt")
        plain, _ = fit("ddp", rank, world_size, max_epochs=4, ckpt_path=tmp_path / "ddp.ckpt")
        second, ended = fit(
            "shardwise", rank, world_size, max_epochs=4, ckpt_path=tmp_path / "ddp.ckpt"
        )
        assert second.seen == plain.seen
        assert_same_bits(full_parameters(second), full_parameters(plain))

        ended.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        ended.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)  # over the first
        again = Regression()
        trainer("shardwise", world_size).validate(
            again, loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False
        )
        assert_same_bits(full_parameters(again), full_parameters(second))


@on_ranks(2)
def test_the_trainers_precision_is_that_of_ddp(rank, world_size):
    with launched(rank, world_size):
        for precision in ("64-true", "bf16-true", "bf16-mixed"):
            plain = fit("ddp", rank, world_size, precision=precision)
            keeps_fp32 = ShardwiseStrategy(precision="fp32")
            strategy = keeps_fp32 if precision == "bf16-mixed" else "shardwise"
            assert_same_fit(fit(strategy, rank, world_size, precision=precision), plain)

        # bf16 copies are what autocast makes of a matrix anyway; of a bare parameter it does not
        options = {"make": TwoNetworks, "precision": "bf16-mixed"}
        plain = fit("ddp_find_unused_parameters_true", rank, world_size, **options)
        sharded = fit("shardwise", rank, world_size, **options)
        assert_same_fit(sharded, plain)
        expected = Precision(torch.bfloat16, torch.float32, torch.float32, cast_inputs=False)
        assert engine_of(sharded[0]).config.precision == expected
        assert {p.dtype for p in sharded[0].parameters()} == {torch.float32}


def refuse_other_settings(module, rank, world_size):
    """A module that was sharded stays so: what is asked for later must be the same."""
    cases = [
        ("mesh=", ShardwiseStrategy(mesh=(world_size, 1)), {}),
        ("units=", ShardwiseStrategy(units=[nn.Linear]), {}),
        ("precision='bf16'", ShardwiseStrategy(precision="bf16"), {}),
        ("'bf16-true'.*torch.float32", "shardwise", {"precision": "bf16-true"}),
    ]
    refuse_settings(module, world_size, [*other_settings(), *cases])
    module, _ = fit("shardwise_stage_1", rank, world_size, max_epochs=1)
    with pytest.raises(ConfigError, match=r"stage=3\): .* before with 1,"):
        trainer("shardwise", world_size).fit(module, loader())

    normed = Normed()
    one = trainer("shardwise", world_size)
    one.validate(normed, loader(), verbose=False)
    one.test(normed, loader(), verbose=False)  # the same again is no other setting
    synced = trainer("shardwise", world_size, sync_batchnorm=True)
    with pytest.raises(ConfigError, match="sync_batchnorm"):
        synced.validate(normed, loader(), verbose=False)
    normed = Normed()
    trainer("shardwise", world_size, sync_batchnorm=True).validate(normed, loader(), verbose=False)
    assert type(normed.norm) is nn.SyncBatchNorm


@on_ranks(2)
def test_what_does_not_go_is_said(rank, world_size, tmp_path):
    with launched(rank, world_size):
        plain = fit("ddp", rank, world_size)
        hybrid = fit(ShardwiseStrategy(mesh=(2, 1)), rank, world_size)
        assert_same_fit(hybrid, plain)
        axes = engine_of(hybrid[0]).comm.axes
        assert axes.replicate is not None and (axes.replicate.size, axes.shard.size) == (2, 1)

        late = [fit(f"shardwise_stage_{stage}", rank, world_size, Late) for stage in (3, 1)]
        assert_same_fit(*late)  # what meta is filled with does not depend on the stage
        assert late[0][0].seen[-1] < late[0][0].seen[0]

        averaged = [
            fit(how, rank, world_size, callbacks=[WeightAveraging()])
            for how in ("shardwise", "ddp")
        ]
        assert_same_fit(*averaged)

        with pytest.raises(ShardError, match="Muon asks for"):
            fit("shardwise", rank, world_size, WholeMatrices)
        normed, _ = fit("shardwise", rank, world_size, Normed)
        with torch.no_grad():
            means = normed.norm.running_mean.clone()
        dist.broadcast(means, 0)
        assert torch.equal(means, normed.norm.running_mean) == (rank == 0)  # each rank's own

        module, ended = fit("shardwise", rank, world_size)
        refuse_other_settings(module, rank, world_size)
        same = ShardwiseStrategy(stage=3, units=[Block], mesh=None, precision="fp32")
        trainer(same, world_size, 1).fit(module, loader())  # goes on where it is
        module.hparams["places"] = {"data": [Path("here") / "there"]}
        ended.save_checkpoint(tmp_path / "paths.ckpt")
        saved = ended.strategy.load_checkpoint(tmp_path / "paths.ckpt")
        assert saved["hyper_parameters"] == {"places": {"data": [str(Path("here") / "there")]}}
        module.hparams["activation"] = nn.ReLU()
        options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        with pytest.raises(ConfigError, match=r"Regression.hparams\['activation'\].*ignore="):
            trainer("shardwise", world_size, 4, **options).fit(module, loader())
        with pytest.raises(CheckpointError, match=r"lightning.*hyper_parameters.*activation"):
            ended.save_checkpoint(tmp_path / "a.ckpt")
        assert not (tmp_path / "a.ckpt").exists()
        with pytest.raises(ConfigError, match="file system"):
            ended.save_checkpoint("s3://bucket/a.ckpt")
        save(tmp_path / "plain", module)
        with pytest.raises(CheckpointError, match="not one that a Lightning Trainer saved"):
            trainer("shardwise", world_size).test(module, loader(), ckpt_path=tmp_path / "plain")
        with gathered(module):
            assert module.blocks[0].up.weight.shape == (11, 8)


def test_options_are_checked_before_a_process_starts():
    with pytest.raises(ConfigError, match=r"ShardwiseStrategy\(stages=\): there is no such option"):
        ShardwiseStrategy(stages=3)
    with pytest.raises(ConfigError, match="stage=5"):
        ShardwiseStrategy(stage=5)


@pytest.mark.slow
def test_the_example_trains_saves_and_goes_on(tmp_path):
    out = run_as_in_the_gallery("lightning_fit.py", "--folder", tmp_path / "saved")
    losses = [float(loss) for loss in re.findall(r"^epoch \d  loss (.*)$", out, re.M)]
    assert len(losses) == 4 and losses[-1] < 0.01 < losses[0], out
    assert (tmp_path / "saved" / "last.ckpt" / "manifest.json").is_file()
