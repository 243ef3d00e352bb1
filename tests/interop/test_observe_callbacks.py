"""Loops of other libraries, observed by one line: the same record as of a loop of one's own."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from launched import launched
from models import Stack
from ranks import on_ranks, run_ranks
from shardwise import shard
from shardwise.errors import ConfigError
from shardwise.monitor.metrics import DATA_S, STALL_S, STEP_S, TOKENS_PER_S
from shardwise.monitor.record import End, Timeline, read_run

pytest.importorskip("transformers", reason="transformers is in the test extra")
pytest.importorskip("accelerate", reason="accelerate is in the test extra")

# Importing these libraries pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def values(record, name):
    return {line.step: line.values[name] for line in record.steps if name in line.values}


def phases(record, step):
    """Return how often rank 0 was in each phase of each unit, in one step."""
    (line,) = (line for _, line in record.lines(Timeline, 0) if line.step == step)
    return Counter((row[1], row[2]) for row in line.spans if row[0] == "main")


def ends(record):
    return [line.error for _, line in record.lines(End)]


def check(record, world_size, num_steps):
    """Hold what every loop must leave behind."""
    assert [line.step for line in record.steps] == [*range(1, num_steps + 1)]
    assert record.facts.num_ranks == world_size == len(record.by_rank)
    assert ends(record) == [None] * world_size
    for line in record.steps:
        assert 0 < line.metrics[DATA_S].max < line.metrics[STEP_S].max


# -- transformers


def train_with_trainer(rank, world_size, folder):
    import transformers

    from shardwise.interop.transformers import ObserveCallback, Trainer, prepare
    from transformers_runs import model_and_data, sharded, train

    path, data = Path(folder), model_and_data()[1]
    with launched(rank, world_size):
        options = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
        saving = {"save_strategy": "steps", "save_steps": 3}
        callback = ObserveCallback(path / "ours", detail_every=1)
        ours = train(path, sharded(), data, **options, **saving, callbacks=[callback])
        assert callback.run is None

        callback = ObserveCallback(path / "again", detail_every=1)
        resume = path / "checkpoint-3"
        train(path, sharded(), data, resume=resume, **options, callbacks=[callback])

        stock = ObserveCallback(path / "stock")
        with stock:
            train(path, prepare(sharded()), data, transformers.Trainer, callbacks=[stock])

        class Breaking(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                if state.global_step == 2:
                    raise KeyError("broken")

        for cls, name in ((Trainer, "broken"), (transformers.Trainer, "broken-stock")):
            seen = ObserveCallback(path / name)
            with pytest.raises(KeyError), seen:
                train(path, prepare(sharded()), data, cls, callbacks=[seen, Breaking()])
            assert seen.run is None
        left = ObserveCallback(path / "left")
        both = [left, Breaking()]
        with pytest.raises(KeyError):
            train(path, prepare(sharded()), data, transformers.Trainer, callbacks=both)
        assert left.run is not None  # nothing told it
        train(path, prepare(sharded()), data, transformers.Trainer, callbacks=[left])
        with pytest.raises(ConfigError, match="not sharded"):
            train(path, *model_and_data(), callbacks=[ObserveCallback(path / "none")])
    return ours.state.log_history


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_trainer_run_is_observed_by_one_callback(world_size, tmp_path):
    logged, *_ = run_ranks(train_with_trainer, world_size, str(tmp_path))
    ours = read_run(tmp_path / "ours")
    check(ours, world_size, 4)
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        told = {row["step"]: row[name] for row in logged if name in row}
        found = values(ours, name)
        assert told and {step: found[step] for step in told} == told
    assert all(line.metrics[TOKENS_PER_S].min > 0 for line in ours.steps)
    # Evaluations after steps 2 and 4 are in no step; the save after step 3 is in step 4.
    for step in (2, 3, 4):
        counted = phases(ours, step)
        # Collectives of the loop's own, for the number of tokens, cut the one time of data loading,
        # and comparisons of ranks in passes 2, 4, 8 the time of backward between units.
        assert 1 <= counted["data", ""] <= 1 + counted["exchange", ""]
        assert counted["forward", "model.layers.0"] >= 2
        assert (counted["save", ""] > 0) is (step == 4)
    second, third = phases(ours, 2), phases(ours, 3)
    for each in (second, third):
        for phase in ("data", "exchange", "backward"):
            del each[phase, ""]
    assert third == second
    assert [line.metrics[STALL_S].min > 0 for line in ours.steps] == [False, False, False, True]
    again = read_run(tmp_path / "again")
    assert [line.step for line in again.steps] == [4]
    for name in ("stock", "left"):
        check(read_run(tmp_path / name), world_size, 4)
    for name in ("broken", "broken-stock"):
        assert ends(read_run(tmp_path / name)) == ["KeyError"] * world_size
    assert not (tmp_path / "none").exists()


@on_ranks(1)
def test_of_experts_of_transformers_those_count_that_a_token_is_sent_to():
    from shardwise.monitor.describe import facts_of
    from transformers_models import make_mixtral

    model = make_mixtral()
    share = model.config.num_experts_per_tok / model.config.num_local_experts
    params = {name: p for name, p in model.named_parameters() if "embed" not in name and p.ndim > 1}
    assert share == 2 / 5 and any(p.ndim == 3 for p in params.values())
    wanted = sum(p.numel() * (share if p.ndim == 3 else 1) for p in params.values())
    shard(model, stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = facts_of(model, [optimizer], ["host"]).flops_per_token
    assert told == pytest.approx(6 * wanted)


# -- accelerate


def train_with_accelerate(rank, world_size, folder):
    from shardwise.interop.accelerate import Accelerator

    losses = []
    with launched(rank, world_size):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with pytest.raises(ConfigError, match="0 sharded models were prepared"):
            accelerator.observe(folder)
        model = shard(Stack(), stage=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = torch.randn(8 * world_size, 8), torch.randn(8 * world_size, 5)
        loader = DataLoader(TensorDataset(x, y), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with accelerator.observe(folder) as run:
            for given, wanted in run.data(loader):
                with accelerator.accumulate(model):
                    loss = (model(given) - wanted).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    accelerator.log({"loss": loss.item(), "note": "text"}, step=run.step)
                    losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_accelerate_loop_is_observed_by_one_line(world_size, tmp_path):
    losses, *_ = run_ranks(train_with_accelerate, world_size, str(tmp_path))
    record = read_run(tmp_path)
    check(record, world_size, 4)
    assert values(record, "loss") == dict(enumerate(losses, 1))
    assert values(record, "note") == {}


# -- Lightning


def train_with_lightning(rank, world_size, folder):
    lightning = pytest.importorskip("lightning", reason="lightning is in the test extra")
    from shardwise.interop.lightning import ObserveCallback

    path = Path(folder)

    class Words(lightning.LightningModule):
        """A model of tokens, in batches that are mappings, as tokenizers make them."""

        def __init__(self, breaks_at=None):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.breaks_at = breaks_at
            self.seen = []

        def training_step(self, batch, number):
            if number == self.breaks_at:
                raise KeyError("broken")
            x = self.table(batch["input_ids"])
            for block in self.blocks:
                x = block(x)
            loss = x.square().mean()
            self.seen.append(loss.item())
            self.log("perplexity", loss.exp())
            return loss

        def validation_step(self, batch, number):
            self.blocks[0](self.table(batch["input_ids"]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(module, name, **options):
        rows = [{"input_ids": torch.arange(4) + n} for n in range(12)]
        loader = DataLoader(rows, batch_size=1)
        trainer = lightning.Trainer(
            strategy="shardwise",
            accelerator="cpu",
            devices=world_size,
            max_steps=4,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=1,
            callbacks=[ObserveCallback(path / name, detail_every=1)],
            **options,
        )
        trainer.fit(module, loader, loader)

    with launched(rank, world_size):
        module = Words()
        fit(module, "run", accumulate_grad_batches=2, val_check_interval=4, limit_val_batches=2)
        with pytest.raises(KeyError):
            fit(Words(breaks_at=2), "broken")
    return module.seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_lightning_fit_is_observed_by_one_callback(world_size, tmp_path):
    seen, *_ = run_ranks(train_with_lightning, world_size, str(tmp_path))
    record = read_run(tmp_path / "run")
    check(record, world_size, 4)
    assert values(record, "loss") == pytest.approx(dict(enumerate(seen[1::2], 1)))
    assert [*values(record, "perplexity")] == [1, 2, 3, 4]
    assert all(line.metrics[TOKENS_PER_S].min > 0 for line in record.steps)
    assert phases(record, 2)["forward", "blocks.0"] == phases(record, 3)["forward", "blocks.0"]
    broken = read_run(tmp_path / "broken")
    assert ends(broken) == ["KeyError"] * world_size
    assert json.loads((broken.path / "observed" / "run.json").read_text())["stage"] == 3
