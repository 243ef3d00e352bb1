"""Metrics of TorchMetrics inside and beside a sharded model: the numbers of the plain model's."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import Stack
from oracle import assert_same_bits
from ranks import on_ranks
from shardwise import gathered, load, save, shard
from trainer import full_parameters

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is in the test extra")

# Importing torchmetrics pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Measured(Stack):
    """A Stack that measures itself: sums, a list of tensors, and states that are buffers."""

    def __init__(self):
        super().__init__()
        classes = {"num_classes": 5}
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(**classes)
        self.ranking = torchmetrics.classification.MulticlassAUROC(**classes)  # keeps every sample
        self.error = torchmetrics.MeanSquaredError()
        self.error.persistent(True)  # its state belongs to the state_dict

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)

    def forward(self, x, y=None):
        logits = super().forward(x)
        if y is not None:
            self.accuracy.update(logits.detach(), y)
            self.ranking.update(logits.detach(), y)
            self.error.update(logits.detach(), torch.ones_like(logits))
        return logits


def measure(rank, model, inner):
    """Train, with metrics inside the model and a collection beside it; return what they say."""
    beside = torchmetrics.MetricCollection(
        {"mean": torchmetrics.MeanMetric(), "most": torchmetrics.MaxMetric()}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(rank)
    said = []
    for step in range(3):
        x = torch.randn(4 + 2 * rank, 8, generator=random)  # ranks see unlike numbers of samples
        y = torch.randint(5, (4 + 2 * rank,), generator=random)
        loss = nn.functional.cross_entropy(model(x, y), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(beside(loss.detach())["mean"])  # of this step, over the ranks
        if step == 1:
            said += [inner.accuracy.compute(), inner.accuracy.tp]  # in the middle of an epoch
    said += [inner.accuracy.compute(), inner.ranking.compute(), inner.error.compute()]
    said += list(beside.compute().values())
    inner.accuracy.reset()
    said.append(inner.accuracy.tp)
    return said


@on_ranks(2)
def test_metrics_of_a_sharded_model_are_those_of_the_plain_one(rank, tmp_path):
    torch.manual_seed(0)
    plain = Measured()
    # DDP would overwrite the metrics' buffers with rank 0's; then it is no truth.
    truth = measure(rank, DistributedDataParallel(plain, broadcast_buffers=False), plain)
    for options in ({"stage": 1}, {"stage": 3}):
        torch.manual_seed(0)
        model = Measured()
        shard(model, **options)
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        found = measure(rank, model, model)
        for ours, theirs in zip(found, truth, strict=True):
            assert torch.equal(ours, theirs)
        assert_same_bits(full_parameters(model), dict(plain.named_parameters()))
        with gathered(model):
            assert_same_bits(model.state_dict(), plain.state_dict())
        model.eval()
        assert model.error.total > 0
    # A metric keeps its state beside the parameters and buffers, so a checkpoint is told about it.
    save(Path(tmp_path, "c"), model, extra={"error": model.error})
    torch.manual_seed(5)
    again = Measured()
    shard(again, stage=2)
    load(Path(tmp_path, "c"), again, extra={"error": again.error})
    assert_same_bits(full_parameters(again), dict(plain.named_parameters()))
    assert torch.equal(again.error.total, model.error.total)  # each rank's own
    assert torch.equal(again.error.sum_squared_error, model.error.sum_squared_error)
