"""A rank that waits for others is told who is missing; one that waits for ever is told why."""

import io
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from ranks import run_ranks
from shardwise import shard
from shardwise.comm.watch import WATCH
from shardwise.errors import CollectiveError

LIMIT_S = 300.0  # against hangs only


class Chosen(nn.Module):
    """Runs one of its layers, which the caller chooses."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, w), nn.Linear(w, 4)) for w in widths)

    def forward(self, x, which):
        return self.layers[which](self.first(x))


def make_chosen(how, widths):
    model = Chosen(widths)
    if how == "fully_shard":
        for layer in model.layers:
            shardwise.fully_shard(layer)
        return shardwise.fully_shard(model)
    return shard(model, stage=3, units=[nn.Sequential], layout=how)


def choose_different_layers(rank, world_size, how, widths):
    """Run two steps alike, then another layer on rank 0; return the error."""
    WATCH.look_every_s = 0.2
    model = make_chosen(how, widths)
    for which in (1, 0):
        model(torch.ones(2, 4), which).sum().backward()
        model.zero_grad()
    begun = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        for _ in range(3):
            model(torch.ones(2, 4), int(rank == 0)).sum().backward()
    assert time.monotonic() - begun < LIMIT_S
    with pytest.raises(CollectiveError) as again:
        model(torch.ones(2, 4), 0)
    assert "start again from a checkpoint" in str(again.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_ranks", "how", "widths"),
    [
        (2, "rows", (8, 8)),
        (3, "flat", (8, 20)),
        (2, "fully_shard", (8, 20)),
        (3, "fully_shard", (8, 8)),
    ],
)
def test_ranks_that_run_different_units_end_with_both_named(num_ranks, how, widths):
    found = run_ranks(
        choose_different_layers, num_ranks, how, widths, timeout_s=LIMIT_S, fresh=True
    )
    circle = [text for text in found if "for each other" in text]
    assert circle, found
    for text in circle:
        assert "rank 0 waits in" in text and "optional=" in text
        assert "of unit 'layers.1'" in text and text.count("of unit '") >= 3
        assert "test_waits.py:" in text


def save_on_rank_0_only(rank, world_size, folder):
    WATCH.look_every_s = 0.2
    model = shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CollectiveError) as caught:
        if rank == 0:
            shardwise.save(folder, model, optimizer, step=1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_save_on_one_rank_while_the_others_train_is_named_with_its_line(num_ranks, tmp_path):
    found = run_ranks(
        save_on_rank_0_only, num_ranks, str(tmp_path / "run"), timeout_s=LIMIT_S, fresh=True
    )
    text = next(text for text in found if "for each other" in text)
    assert "rank 0 waits in" in text and "all_gather of unit" in text
    assert "Every rank must make the same calls" in text


class Heard(io.StringIO):
    """What was written to standard error, and a moment when it is known that something was."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.event.set()
        return count


def come_late(rank, world_size, folder):
    """Let the last rank come to a gather only when all others have complained."""
    model = shard(nn.Linear(4, 4))
    heard, before = Heard(), sys.stderr
    sys.stderr, WATCH.patience_s, WATCH.look_every_s = heard, 2.0, 0.2
    complaints = Path(folder)
    try:
        for number in range(2):
            if rank == world_size - 1:
                while len(list(complaints.glob(f"{number}-*"))) < world_size - 1:
                    time.sleep(0.05)
            else:
                threading.Thread(
                    target=lambda n=number, e=heard.event: (
                        e.wait(),
                        (complaints / f"{n}-{rank}").touch(),
                    )
                ).start()
            model(torch.ones(2, 4)).sum().backward()
            heard.event = threading.Event()
    finally:
        sys.stderr, WATCH.patience_s, WATCH.look_every_s = before, 30.0, 1.0
    return heard.getvalue()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_who_waits_long_is_told_once_who_is_missing_and_goes_on(num_ranks):
    with tempfile.TemporaryDirectory() as folder:
        *early, late = run_ranks(come_late, num_ranks, folder, timeout_s=LIMIT_S, fresh=True)
    assert late == ""
    for rank, text in enumerate(early):
        lines = text.splitlines()
        assert len(lines) == 2, text  # one for each of two waits
        for line in lines:
            assert line.startswith(f"shardwise: rank {rank} has waited 2 s in all_gather of unit")
            assert f"rank {num_ranks - 1} is in no call of Shardwise" in line
            assert "test_waits.py:" in line and line.endswith("Every rank must make this call")
