"""Settings of a DeepSpeed config as values: copied, checked again, and refused in our words."""

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.settings import DeepSpeedSettings, from_deepspeed
from shardwise.interop.foreign_keys import KEYS, NOT_WRITTEN, TORCH_SCHEDULERS
from shardwise.interop.foreign_settings import read_train_keys
from shardwise.train.config import TrainConfig

AUTO = {"fp16": {"enabled": "auto", "initial_scale_power": 8}, "bf16": {"enabled": "auto"}}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def test_a_scaler_waits_until_the_precision_is_decided() -> None:
    undecided = from_deepspeed(AUTO)
    with pytest.raises(ConfigError, match=r'auto=\{"fp16.enabled": True\}'):
        undecided.scaler("cpu")
    assert '{"fp16.enabled": True}' in undecided.report.auto["fp16.enabled"]
    decided = from_deepspeed(AUTO, auto={"fp16.enabled": True})
    assert decided.shard["precision"] == "fp16"
    assert decided.scaler("cpu").get_scale() == 256.0
    assert not from_deepspeed(AUTO, auto={"bf16.enabled": True}).scaler("cpu").is_enabled()


def test_a_scaler_is_on_without_being_told_the_device() -> None:
    scaler = from_deepspeed({"fp16": {"enabled": True, "initial_scale_power": 5}}).scaler()
    assert scaler.is_enabled() and scaler.get_scale() == 32.0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_settings_still_misses_what_is_auto(
    again: Callable[[DeepSpeedSettings], DeepSpeedSettings],
) -> None:
    params = {"total_num_steps": "auto", "warmup_num_steps": 2}
    settings = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    copied = again(settings)
    assert copied == settings
    optimizer = torch.optim.SGD(parameters(), lr=0.5)
    with pytest.raises(ConfigError, match="total_num_steps is not given"):
        copied.scheduler(optimizer)
    copied.scheduler(optimizer, total_num_steps=10)


def test_the_options_of_torchs_schedulers_are_those_of_their_signatures() -> None:
    for name, options in TORCH_SCHEDULERS.items():
        made = inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters
        # a file cannot hold a function
        assert set(options) == set(made) - {"optimizer", "scale_fn"}, name


def scheduler_of(params: dict[str, Any], **overrides: Any) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.5)
    block = {"type": "StepLR", "params": params}
    from_deepspeed({"scheduler": block}).scheduler(optimizer, **overrides)


def optimizer_of(params: dict[str, Any], **overrides: Any) -> None:
    from_deepspeed({"optimizer": {"type": "AdamW", "params": params}}).optimizer(
        parameters(), **overrides
    )


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: scheduler_of({"step_sze": 3}), "unknown option 'step_sze' .* mean 'step_size'"),
        (lambda: scheduler_of({"step_size": 3}, gama=0.1), "'gama' of StepLR; .* mean 'gamma'"),
        (lambda: scheduler_of({}), "StepLR refuses its arguments: .*step_size"),
        (lambda: optimizer_of({"lr": -1}), "AdamW refuses its arguments: Invalid learning rate"),
        (lambda: optimizer_of({"lr": 0.1}, wieght_decay=1), "did you mean 'weight_decay'"),
        (lambda: from_deepspeed({}, world_size=0), "world_size: expected a whole number, 1 or"),
        (lambda: from_deepspeed({}, world_size=-2), "world_size: expected .* got -2"),
        (lambda: from_deepspeed({}, world_size="2"), "world_size: expected .* got '2'"),  # type: ignore[arg-type]
        (lambda: from_deepspeed(None), "expected a dict, or the path .* got None"),  # type: ignore[arg-type]
        (lambda: from_deepspeed([1]), r"expected a dict, or the path .* got \[1\]"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_is_told_as_ours(build: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": {"overlap_comm": True}, "gradient_clipping": "auto"}, set()),
        ({"zero_optimization": True}, {"stage"}),
        ({"zero_optimization": {"stage": 0}}, {"stage"}),
        ({"fp16": {"loss_scale": 0}, "bf16": {}, "scheduler": {}}, set()),
        ({"fp16": {"loss_scale": 64}}, {"loss_scale", "loss_scale_window"}),
        ({"fp16": {"enabled": True, "loss_scale_window": 9}}, {"precision", "loss_scale_window"}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {"lr", "optimizer"}),
    ],
)
def test_a_file_wins_over_another_where_its_own_key_has_a_value(
    tmp_path: Path, content: dict[str, Any], said: set[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(content))
    known = dict.fromkeys(TrainConfig.model_fields, "of the other file") | {"precision": "fp16"}
    keys, _ = read_train_keys(tmp_path / "ds.json", known, {}, None)
    assert keys.keys() & known.keys() == said


def test_the_table_names_keys_of_a_run_and_known_kinds_and_fates() -> None:
    kinds = {"any", "flag", "integer", "count", "number", "word", "block"} | {
        "stage",
        "names",
        "switch",
    }
    for section, rows in KEYS.items():
        for name, row in rows.items():
            where = f"{section}: {name}"
            assert row.kind in kinds, where
            assert {fate for fate, _ in row.answers.values()} <= {"mapped", "ignored", "refused"}
            assert set(row.ours) <= {*TrainConfig.model_fields, "dp_shard"}, where
    for library, reasons in NOT_WRITTEN.items():
        assert reasons.keys() <= TrainConfig.model_fields.keys(), library
