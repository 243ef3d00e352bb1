"""DeepSpeed's offload blocks: where a run of the same file keeps state, and the report."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import on_ranks
from shardwise import Offload, shard
from shardwise.errors import ConfigError
from shardwise.homes import resolve_offload
from shardwise.interop.deepspeed import from_deepspeed
from shardwise.train.config import load_config
from test_deepspeed_settings import leaves


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def on(device: str, **others: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "/fast"} if device == "nvme" else {}), **others}


CPU, FILES = on("cpu"), on("nvme", pin_memory=True)
OFFLOADS: list[tuple[dict[str, Any], str | Offload | None]] = [
    ({"offload_optimizer": CPU, "offload_param": CPU}, "cpu"),
    ({"offload_optimizer": CPU, "offload_param": CPU, "stage": 1}, "cpu"),
    ({"offload_optimizer": CPU, "stage": 2}, "cpu"),
    ({"offload_optimizer": CPU}, Offload(optimizer="cpu")),
    ({"offload_optimizer": CPU, "stage": "auto"}, Offload(optimizer="cpu")),
    ({"offload_optimizer": FILES}, Offload(optimizer="nvme:/fast")),
    ({"offload_optimizer": FILES, "stage": 1}, "nvme:/fast"),
    ({"offload_optimizer": FILES, "offload_param": CPU}, "nvme:/fast"),
    ({"offload_optimizer": CPU, "offload_param": FILES}, Offload("nvme:/fast", None, "cpu")),
    (
        {"offload_optimizer": FILES, "offload_param": on("nvme", nvme_path="/a")},
        Offload("nvme:/a", None, "nvme:/fast"),
    ),
    ({"offload_param": CPU}, "cpu"),
    ({"offload_param": FILES}, Offload("nvme:/fast", None, "cpu")),
    ({"offload_param": FILES, "stage": 2}, None),
    ({"offload_param": {"device": "nvme"}, "stage": 2}, None),
    ({"offload_optimizer": on("cpu", ratio=0.3)}, Offload(optimizer="cpu", fraction=0.3)),
    (
        {"offload_optimizer": on("cpu", ratio=0.3), "offload_param": CPU},
        Offload("cpu", None, "cpu", 0.3),
    ),
    ({"offload_optimizer": on("none", ratio=0.3, nvme_path="/fast"), "offload_param": CPU}, "cpu"),
    ({"offload_optimizer": on("none"), "offload_param": on("none")}, None),
    ({"cpu_offload": True, "stage": 2}, "cpu"),
    ({"cpu_offload": True, "cpu_offload_param": True}, "cpu"),
    ({"cpu_offload": False}, None),
]


@pytest.mark.parametrize(("block", "expected"), OFFLOADS)
def test_homes_of_state_become_an_offload_of_shard_and_every_key_is_told(
    block: dict[str, Any], expected: str | Offload | None
) -> None:
    for ordered in (
        zero(**block),
        {"zero_optimization": {**block, "stage": block.get("stage", 3)}},
    ):
        settings = from_deepspeed(ordered)
        assert settings.shard.get("offload") == expected
        told = [line.key for line in settings.report.lines if line.fate != "default"]
        assert sorted(told) == sorted(leaves(ordered))
    resolve_offload(settings.shard.get("offload"))


def test_the_report_says_where_state_rests_that_the_file_would_have_elsewhere() -> None:
    report = from_deepspeed(zero(offload_param=on("nvme"), offload_optimizer=on("none"))).report
    name = "zero_optimization.offload_param.device"
    assert report.mapped[name].startswith(
        "shard(offload=Offload(params='nvme:/fast', optimizer='cpu')); the optimizer is in host"
    )
    other = "zero_optimization.offload_optimizer.device"
    assert "steps where its parameters rest" in report.ignored[other]
    report = from_deepspeed(zero(offload_param=on("cpu"), stage=2)).report
    assert "stay on the device at stage 2" in report.ignored[name]
    report = from_deepspeed(zero(offload_optimizer=on("none", ratio=0.3, nvme_path="/x"))).report
    assert report.ignored.keys() == {
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_optimizer.nvme_path",
    }
    block = on("nvme", ratio=0.5)
    report = from_deepspeed(zero(offload_optimizer=block)).report
    assert "fraction=0.5" in report.mapped["zero_optimization.offload_optimizer.ratio"]
    assert "Offload(optimizer='nvme:/fast', fraction=0.5)" in report.mapped[other]


@on_ranks(1)
def test_a_run_whose_file_says_nvme_has_the_bits_of_one_whose_state_stays(tmp_path):
    """Two steps of a model whose state lies in files are those of one on the device."""
    folder = str(tmp_path)
    files = {"device": "nvme", "nvme_path": folder}
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}
    found = []
    for block in ({}, {"offload_optimizer": {**files, "ratio": 0.5}, "offload_param": files}):
        settings = from_deepspeed({**content, **zero(**block)})
        torch.manual_seed(0)
        model = shard(
            torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), **settings.shard
        )
        optimizer = settings.optimizer(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model(torch.ones(2, 4)))
    assert torch.equal(*found)


def test_two_files_that_offload_differently_are_told(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("offload: {optimizer: cpu}\n")
    found = {"offload": {"optimizer": "cpu", "params": "nvme:/x"}}
    with pytest.raises(ConfigError, match=r"offload: .*run\.yaml says .*ds\.json says"):
        load_config(run, {}, (tmp_path / "ds.json", found))
