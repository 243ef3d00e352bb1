"""Keys of `shardwise train`: YAML, flags, and errors written for people."""

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.checks import resolve_batch
from shardwise.train.config import TrainConfig, dump_config, load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "dim: 64\nlr: 1.0e-2\n"), {"lr": 0.5})
    assert (config.dim, config.lr) == (64, 0.5)


def test_a_float_without_a_dot_is_a_float(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "lr: 3e-4\n"), {}).lr == 3e-4


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n"), {}) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stge: 2\n", ["unknown key 'stge'", "did you mean 'stage'"]),
        ("micro-batch: 2\n", ["unknown key 'micro-batch'", "did you mean 'micro_batch'"]),
        ("zzz: 2\n", ["unknown key 'zzz'", "--help"]),
        ("dim: wide\n", ["dim: expected a valid integer", "'wide'"]),
        ("dim: -1\n", ["dim: expected greater than 0", "-1"]),
        ("stage: 4\n", ["stage: expected 0, 1, 2 or 3", "4"]),
        ("schedule: cosin\n", ["expected 'constant', 'cosine', 'linear'", "mean 'cosine'"]),
        ("dim: 60\nheads: 8\n", ["heads: expected dim / heads", "60"]),
        ("kv_heads: 3\n", ["kv_heads: expected a divisor of heads 8", "3"]),
        ("steps: 5\nwarmup_steps: 6\n", ["warmup_steps: expected at most steps 5", "6"]),
        ("min_lr: 1\n", ["min_lr: expected at most lr"]),
        ("resume: atuo\n", ["resume: expected 'auto', 'never' or the step", "mean 'auto'"]),
        ("resume: true\n", ["resume: expected 'auto', 'never' or the step", "got True"]),
        ("resume: 0\n", ["resume: expected 'auto', 'never' or the step", "got 0"]),
        ("save_every: -1\n", ["save_every: expected greater than or equal to 0", "-1"]),
        ("keep_every: 5\n", ["keep_every: expected keep_last beside it"]),
        ("[1, 2]\n", ["expected `key: value` lines", "list"]),
        ("a: b: c\n", ["expected YAML"]),
    ],
)
def test_an_error_names_the_file_the_key_and_what_was_expected(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_an_error_in_a_flag_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="flag --micro-batch: micro_batch: expected greater"):
        load_config(None, {"micro_batch": 0})


def test_every_bad_key_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)lr.*heds"):
        load_config(write(tmp_path, "lr: -1\nheds: 2\n"), {})


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        load_config(tmp_path / "gone.yaml", {})


def test_a_config_is_the_same_after_yaml_and_back(tmp_path: Path) -> None:
    config = TrainConfig(dim=64, lr=1e-5, data=tmp_path, reduce_every="step")
    assert load_config(write(tmp_path, dump_config(config)), {}) == config


def test_a_format_of_gathers_is_known_and_needs_gathers() -> None:
    assert load_config(None, {"gather": "fp8", "gather_block": "64"}).gather_block == 64
    assert load_config(None, {"reduce": "int8-a2a", "stage": 0}).reduce == "int8-a2a"
    for flags, told in (
        ({"gather": "int8", "stage": 0}, "nothing is gathered at stage 0"),
        ({"gather": "int9"}, "int9"),
        ({"reduce": "int8"}, "int8-a2a"),
        ({"gather": "int8", "gather_block": 24}, "multiple of 16"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_config(None, flags)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 12), (2, 6), (3, 4), (4, 3)])
def test_a_global_batch_decides_accumulation(world_size: int, accumulation: int) -> None:
    config = resolve_batch(TrainConfig(micro_batch=2, global_batch=24), world_size)
    assert (config.accumulation, config.global_batch) == (accumulation, 24)
    assert resolve_batch(config, world_size) == config


@pytest.mark.parametrize("flag", ["40", 40])
def test_a_step_to_resume_from_is_a_number(flag: object) -> None:
    assert load_config(None, {"resume": flag}).resume == 40


def test_a_global_batch_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 6 \(micro_batch 2 x 3 ranks\), got 16"):
        resolve_batch(TrainConfig(micro_batch=2, global_batch=16), 3)


def test_an_accumulation_that_contradicts_the_global_batch_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs 4, got 3"):
        resolve_batch(TrainConfig(micro_batch=2, global_batch=16, accumulation=3), 2)


def test_without_a_global_batch_it_is_the_product() -> None:
    config = resolve_batch(TrainConfig(micro_batch=2, accumulation=3), 4)
    assert config.global_batch == 24
