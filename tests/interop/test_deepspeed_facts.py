"""Against the installed DeepSpeed: its keys, every step of its curves, its batch arithmetic."""

from typing import Any

import pytest
import torch

from deepspeed_facts import (
    CURVES,
    NEEDS_DEEPSPEED,
    SIZES,
    as_json,
    ask_deepspeed,
    follow,
    two_groups,
)
from ranks import run_ranks
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import from_deepspeed
from shardwise.interop.deepspeed.reading import resolve
from shardwise.interop.foreign_keys import REMOVED

pytestmark = [pytest.mark.slow, NEEDS_DEEPSPEED]
PREFIXES = {
    "zero_optimization": "zero_optimization",
    "offload_param": "zero_optimization.offload_param",
    "offload_optimizer": "zero_optimization.offload_optimizer",
    "fp16": "fp16",
    "bf16": "bf16",
    "zenflow": "zero_optimization.zenflow",
    "activation_checkpointing": "activation_checkpointing",
}
GUESSES: tuple[Any, ...] = (False, 1, "none", "fp32", {}, [], True)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return run_ranks(ask_deepspeed, 1, fresh=True)[0]


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def fates(path: str) -> set[str]:
    """Return what became of a key over values of every kind; a wrong kind is no fate."""
    found = set()
    for value in GUESSES:
        try:
            report = from_deepspeed(nested(path, value)).report
        except ConfigError as error:
            text = str(error)
            found.add("unknown" if "unknown key" in text else "refused")
        else:
            found |= {line.fate for line in report.lines if line.key.startswith(path)}
    return found


def test_every_key_of_deepspeeds_models_is_mapped_ignored_or_refused(
    facts: dict[str, Any],
) -> None:
    unknown, without_effect = [], []
    for model, names in facts["fields"].items():
        for name in names:
            found = fates(f"{PREFIXES[model]}.{name}")
            unknown += [f"{model}.{name}"] if "unknown" in found else []
            if not found & {"mapped", "ignored"} and model != "zenflow":
                without_effect.append(f"{model}.{name}")
    assert not unknown
    assert without_effect == ["zero_optimization.zenflow"]  # whatever it says, it is not there
    assert fates("zero_optimization.stge") == {"unknown"}


def test_every_key_that_deepspeed_removed_is_refused_with_what_to_use(
    facts: dict[str, Any],
) -> None:
    assert set(facts["removed"]) == set(REMOVED)
    for path in REMOVED:
        with pytest.raises(ConfigError, match="gone from DeepSpeed") as caught:
            from_deepspeed(nested(path, {"enabled": False}))
        assert REMOVED[path] in str(caught.value)


@pytest.mark.parametrize("number", range(len(CURVES)), ids=lambda n: f"{n}-{CURVES[n][0]}")
def test_a_scheduler_gives_every_update_deepspeeds_rate_and_momenta_to_the_bit(
    facts: dict[str, Any], number: int
) -> None:
    name, options = CURVES[number]
    settings = from_deepspeed({"scheduler": {"type": name, "params": options}})
    optimizer = two_groups()
    assert as_json(follow(optimizer, settings.scheduler(optimizer))) == as_json(
        facts["curves"][number]
    )


def test_two_sizes_of_a_batch_give_the_third_as_in_deepspeed(facts: dict[str, Any]) -> None:
    for (total, micro, passes, ranks), theirs in zip(SIZES, facts["batches"], strict=True):
        given = {"micro_batch": micro, "accumulation": passes, "global_batch": total}
        sizes = {name: size for name, size in given.items() if size is not None}
        if total is None and micro is None:
            continue  # DeepSpeed wants one of them; here the caller may have it
        if theirs is None:
            with pytest.raises(ConfigError, match="train_batch_size: expected"):
                resolve(sizes, ranks, "ds.json")
            continue
        batch = resolve(sizes, ranks, "ds.json")
        assert [*batch.values()] == theirs, (sizes, ranks)
    assert any(theirs is None for theirs in facts["batches"])


def test_a_schedule_goes_on_from_its_state() -> None:
    settings = from_deepspeed({"scheduler": {"type": CURVES[11][0], "params": CURVES[11][1]}})
    optimizer = two_groups()
    expected = follow(optimizer, settings.scheduler(optimizer))
    optimizer = two_groups()
    scheduler = settings.scheduler(optimizer)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    again = two_groups()
    for group in again.param_groups:
        group["lr"] = 5.0
    resumed = settings.scheduler(again)
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    assert follow(again, resumed)[:20] == expected[9:29]
    assert isinstance(resumed, torch.optim.lr_scheduler.LRScheduler)
