"""Stock torch reads, and reshards, our checkpoints as they are; so does the safetensors library.

Nothing of ours runs on the reading side: `dcp.load` with `HuggingFaceStorageReader`, `safe_open`.
"""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise
from ranks import run_ranks
from saving import Net, Setting, build, differences, take_step, truth_of


def save_and_tell(rank, world_size, setting, folder, make_model=Net):
    """Save; return all that stock torch should find, by its key: full tensors, gathered."""
    run = build(setting, make_model=make_model)
    for step in range(2):
        take_step(run, step)
    shardwise.save(folder, run.model, run.optimizer, extra={"mine": torch.arange(3) + rank})
    return keys_of(truth_of(run))


def keys_of(truth):
    """Name a run's tensors as files name them; tied weights and per-rank buffers have one name."""
    found = {}
    for key, value in truth.items():
        kind, _, name = key.partition(" ")
        if kind in ("param", "buffer") and name != "head.weight":
            found[name] = value
        elif kind == "state" and not name.startswith("head.weight"):
            param, state = name.split(" ")
            found[f"optim.state.{param}.{state}"] = value
    return found


def dcp_load(into, folder, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")  # torch's own, about its own
        warnings.filterwarnings("ignore", message=".*(DCP|torch.distributed|TypedStorage).*")
        dcp.load(into, storage_reader=HuggingFaceStorageReader(str(folder)), **options)


SAVED = [
    Setting(1, 3, "rows"),
    Setting(1, 3, "flat", "root"),
    Setting(2, 0, "flat"),
    Setting(2, 3, "rows", "linear"),
    Setting(3, 3, "rows", precision="bf16"),
    Setting(3, 3, "flat"),
    Setting(3, 1, "flat", "root"),
    Setting(4, 3, "flat", num_replicas=2),
]


@pytest.mark.parametrize("setting", SAVED, ids=str)
def test_stock_dcp_and_safetensors_read_every_tensor_whole(tmp_path, setting):
    expected = run_ranks(save_and_tell, setting.num_ranks, setting, tmp_path / "c")[0]
    assert {"few", "cells.0.gain", "optim.state.few.exp_avg", "optim.state.few.step"} <= set(
        expected
    )
    found = {key: torch.full_like(value, 3) for key, value in expected.items()}
    dcp_load(found, tmp_path / "c", no_dist=True)
    assert not differences(found, expected)
    flat = {}
    for path in sorted((tmp_path / "c").glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                flat.setdefault(key, []).append(file.get_tensor(key))
    for rank in range(setting.num_ranks):  # what is a rank's own carries its number
        (own,) = (parts for key, parts in flat.items() if key.startswith(f"rank{rank:05d}.extra"))
        assert torch.equal(own[0], torch.arange(3) + rank)
    for key, value in expected.items():  # ranks, and the boxes of each, are in order
        joined = torch.cat([part.reshape(-1) for part in flat[key]])
        assert torch.equal(joined, value.reshape(-1)), key


class Stock(Net):
    """The model for torch's own sharding: DTensors have no dims to cut in a scalar."""

    def __init__(self):
        super().__init__()
        for cell in self.cells:
            cell.gain = nn.Parameter(torch.ones(1))


def load_into_fsdp2(rank, world_size, folders, expected):
    problems = []
    for folder, truth in zip(folders, expected, strict=True):
        torch.manual_seed(5)
        model = Stock()
        for cell in model.cells:
            fully_shard(cell)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        optimizer.step()
        into = {n: p.detach() for n, p in model.named_parameters()}
        for name, p in model.named_parameters():
            for key, value in optimizer.state.get(p, {}).items():
                into[f"optim.state.{name}.{key}"] = value
        into = {key: value for key, value in into.items() if key in truth}
        assert sum(isinstance(value, DTensor) for value in into.values()) > 20
        dcp_load(into, folder)
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in into.items()}
        problems += differences(full, {key: truth[key] for key in into})
        missing = {k for k in truth if k not in into and not k.startswith(("norm.", "counts"))}
        assert all("never_used" in key for key in missing), missing
    return problems


@pytest.mark.parametrize("size", [1, 2, 3])
def test_stock_dcp_reshards_into_an_fsdp2_model(tmp_path, size):
    folders, expected = [], []
    for layout in ("rows", "flat"):
        folders.append(tmp_path / layout)
        setting = Setting(size, 3, layout)
        expected.append(run_ranks(save_and_tell, size, setting, folders[-1], Stock)[0])
    assert run_ranks(load_into_fsdp2, 2, folders, expected) == [[], []]
