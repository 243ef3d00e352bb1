"""`shardwise convert` between forms: recognized by keys, reported once, nothing silently lost."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli.main import call_command
from shardwise.errors import ConfigError
from shardwise.interop.foreign_settings import read_accelerate_keys

run_command = partial(call_command, "convert")

ZERO_2 = {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 10}}


def write(folder: Path, content: dict[str, Any], **named: Any) -> Path:
    """Write a DeepSpeed JSON, and accelerate's YAML that names it."""
    (folder / "ds.json").write_text(json.dumps(content))
    block = {"deepspeed_config_file": "ds.json", **named.pop("deepspeed_config", {})}
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"num_processes": 2, "deepspeed_config": block, **named}))
    return path


@pytest.mark.parametrize(
    "content",
    [{}, {"bf16": {}}, {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": False}}],
)
@pytest.mark.parametrize("named", ["bf16", "BF16"])
def test_the_precision_of_accelerates_file_holds_where_the_json_says_none(
    tmp_path: Path, content: dict[str, Any], named: str
) -> None:
    path = write(tmp_path, {**ZERO_2, **content}, mixed_precision=named)
    keys, report = read_accelerate_keys(path)
    assert (keys["precision"], keys["prefetch_bytes"]) == ("bf16", 20)
    assert report.mapped["mixed_precision"] == "precision"


def test_fp16_of_accelerates_file_brings_the_scale_of_the_json(tmp_path: Path) -> None:
    path = write(tmp_path, {"bf16": {"enabled": "auto"}}, mixed_precision="fp16")
    keys, _ = read_accelerate_keys(path)
    assert (keys["precision"], keys["loss_scale"]) == ("fp16", 65536.0)
    path = write(tmp_path, {"fp16": {"initial_scale_power": 4}}, mixed_precision="fp16")
    keys, report = read_accelerate_keys(path)
    assert (keys["precision"], keys["loss_scale"]) == ("fp16", 16.0)
    assert "fp16.initial_scale_power" in report.mapped


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"fp16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}}, "no"),
        ({"bf16": {"enabled": False}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16"),
    ],
)
def test_two_precisions_in_two_files_are_refused(
    tmp_path: Path, content: dict[str, Any], named: str
) -> None:
    path = write(tmp_path, content, mixed_precision=named)
    with pytest.raises(ConfigError, match=r"mixed_precision: it means .* the DeepSpeed file says"):
        read_accelerate_keys(path)


def test_accumulation_of_accelerates_file_fills_the_json(tmp_path: Path) -> None:
    content = {**ZERO_2, "gradient_accumulation_steps": "auto", "train_batch_size": 24}
    keys, _ = read_accelerate_keys(write(tmp_path, content, gradient_accumulation_steps=3))
    assert (keys["micro_batch"], keys["accumulation"], keys["global_batch"]) == (4, 3, 24)
    path = write(tmp_path, {"gradient_accumulation_steps": 4}, gradient_accumulation_steps=3)
    with pytest.raises(
        ConfigError, match="gradient_accumulation_steps: got 4 here and accumulation=3 in"
    ):
        read_accelerate_keys(path)


@pytest.mark.parametrize(
    "beside",
    [
        {"zero_stage": 3},
        {"gradient_accumulation_steps": 4},
        {"gradient_clipping": 0.5},
        {"offload_param_device": "none"},
        {"zero3_save_16bit_model": True},
    ],
)
def test_what_accelerate_refuses_beside_a_json_is_refused(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    path = write(tmp_path, ZERO_2, deepspeed_config=beside)
    with pytest.raises(ConfigError, match=f"{next(iter(beside))}: ds.json decides it"):
        read_accelerate_keys(path)


def test_accelerates_mesh_becomes_replicas_and_more_than_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1, "cp_size": 1}

    def read(ranks: int, **others: int) -> Any:
        block = {f"parallelism_config_{k}": v for k, v in {**sizes, **others}.items()}
        named = {"fsdp_config": {"fsdp_version": 2}, "num_machines": 2, "num_processes": ranks}
        path.write_text(yaml.safe_dump({**named, "parallelism_config": block}))
        return read_accelerate_keys(path)

    keys, report = read(8)
    assert (keys["dp_replicate"], keys["ranks"]) == (2, 8)
    assert "parallelism_config.parallelism_config_dp_shard_size" in report.mapped
    assert "num_machines" in report.ignored  # the mesh decides the replicas
    with pytest.raises(ConfigError, match="product is num_processes 6, got 8"):
        read(6)
    for name in ("tp_size", "cp_size", "sp_size"):
        with pytest.raises(ConfigError, match=f"parallelism_config_{name}: only data is parallel"):
            read(16, **{name: 2})


FSDP_BLOCK = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "FALSE"}}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.001}}
FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("default_config.json", FSDP_BLOCK, "accelerate"),
    ("accelerate.yaml", {"mixed_precision": "no", "num_processes": 2}, "accelerate"),
    ("ds_config.conf", {**ZERO_2, "optimizer": OPTIMIZER}, "deepspeed"),
    ("ds.json", {"optimizer": OPTIMIZER}, "deepspeed"),
    ("ds.conf", {"optimizer": OPTIMIZER}, "deepspeed"),
    ("ds.json", {"zero_optimisation": {}}, "zero_optimization"),
    ("run.json", {"optimizer": "sgd", "lr": 0.001}, "shardwise"),
    ("run.yaml", {"stagee": 3}, "shardwise"),
]


@pytest.mark.parametrize(("name", "content", "form"), FORMS)
def test_a_form_is_told_by_its_keys_not_by_its_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: dict[str, Any],
    form: str,
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content) if not name.endswith("yaml") else yaml.safe_dump(content))
    target = form if form in ("deepspeed", "accelerate", "shardwise") else "shardwise"
    assert run_command([str(path), "--to", target]) == 2
    wanted = f"of the form {target} already" if target == form else f"did you mean '{form}'"
    assert wanted in capsys.readouterr().err


def test_a_report_between_two_foreign_forms_tells_each_key_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    content = {
        **ZERO_2,
        "bf16": {"enabled": "auto"},
        "optimizer": OPTIMIZER,
        "steps_per_print": 5,
        "gradient_clipping": 0.5,
    }
    path.write_text(json.dumps(content))
    assert run_command([str(path), "--to", "accelerate", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(err)
    assert told["mapped"].keys() == {"stage"}  # the only one that the new file has
    assert told["mapped"].keys().isdisjoint(told["ignored"])
    assert {"optimizer", "grad_clip", "steps_per_print"} <= told["ignored"].keys()
    assert told["auto"].keys() == {"bf16.enabled"}
    assert "mixed_precision" not in yaml.safe_load(out)
    content["bf16"] = {"enabled": True}
    path.write_text(json.dumps(content))
    assert run_command([str(path), "--to", "accelerate"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["mixed_precision"] == "bf16"


def test_a_class_of_another_model_is_taken_over_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    block = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    path.write_text(yaml.safe_dump({"fsdp_config": block}))
    keys, report = read_accelerate_keys(path)
    assert keys["units"] == ["LlamaDecoderLayer"]
    (text,) = (t for k, t in report.mapped.items() if k.endswith("cls_to_wrap"))
    assert "leave them out for `shardwise train`" in text
