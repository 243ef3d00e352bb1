"""The block ``zero_optimization``: stage, prefetching, and where state rests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.reading import Handler, Reader
from shardwise.plan.foreign_keys import ZERO, Key

_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ON_DEVICE = "nothing is off the device"
_LARGEST_PREFETCH = 1 << 40

OFFLOAD_PARAM: dict[str, Key] = {
    "device": Key("any", "", ""),
    "nvme_path": Key("any", "", _ON_DEVICE),
    **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), Key("whole", "", _ON_DEVICE)),
    "pin_memory": Key("flag", "", _ON_DEVICE),
}
OFFLOAD_OPTIMIZER: dict[str, Key] = {
    "device": Key("any", "", ""),
    "nvme_path": Key("any", "", _ON_DEVICE),
    **dict.fromkeys(("buffer_count", "buffer_size"), Key("whole", "", _ON_DEVICE)),
    **dict.fromkeys(
        ("pin_memory", "pipeline_read", "pipeline_write", "fast_init", "super_offload"),
        Key("flag", "", _ON_DEVICE),
    ),
    **dict.fromkeys(("ratio", "cpuadam_cores_perc"), Key("number", "", _ON_DEVICE)),
}
_OLD_NAMES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer",
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}
_AUTOS = {
    "prefetch_bucket_size": "the largest unit is gathered ahead",
    "stage3_prefetch_bucket_size": "the largest unit is gathered ahead",
    "stage": "give stage= to shard(), or auto=",
}


def read_zero(reader: Reader, block: Any, precision: str | None) -> dict[str, int]:
    """Return ``stage`` and ``prefetch_bytes``, where they are given, as ``shard()`` takes them.

    **Raises** ConfigError where state is to rest off the device.
    """
    whole = "zero_optimization"
    if block is None or isinstance(block, bool):
        stage = 1 if block else 0
        reader.mapped(whole, block, f"shard(stage={stage})")
        return {"stage": stage}
    block = reader.mapping(whole, block)
    _refuse_two_names(reader, block)
    found: dict[str, int] = {}

    def take_stage(name: str, value: Any) -> None:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, bool) or number not in (0, 1, 2, 3):
            raise reader.refusal(name, f"expected 0, 1, 2 or 3, got {value!r}")
        found["stage"] = int(number)
        reader.mapped(name, value, f"shard(stage={found['stage']})")

    def prefetch(name: str, value: Any) -> None:
        elements = reader.whole(name, value)
        if elements > _LARGEST_PREFETCH:
            raise reader.refusal(name, f"expected at most {_LARGEST_PREFETCH:,}, got {value!r}")
        found["prefetch_bytes"] = elements * _COMPUTE_BYTES[precision or "fp32"]
        reader.mapped(name, value, f"shard(prefetch_bytes={found['prefetch_bytes']})")

    def zenflow(name: str, value: Any) -> None:
        raise reader.refusal(name, "it approximates the step; not there; leave it out")

    handlers: dict[str, Handler] = {
        "stage": take_stage,
        "prefetch_bucket_size": prefetch,
        "stage3_prefetch_bucket_size": prefetch,
        "offload_param": lambda name, value: _offload(reader, name, value, OFFLOAD_PARAM),
        "offload_optimizer": lambda name, value: _offload(reader, name, value, OFFLOAD_OPTIMIZER),
        "cpu_offload": lambda name, value: _old_offload(reader, name, value),
        "cpu_offload_param": lambda name, value: _old_offload(reader, name, value),
        "zenflow": zenflow,
    }
    reader.walk(block, f"{whole}.", ZERO, handlers, _AUTOS)
    if "stage" not in block:
        reader.add("default", f"{whole}.stage", 0, "shard(stage=0)")
    if block.get("stage") != "auto":  # which leaves it to shard()
        found.setdefault("stage", 0)
    return found


def _refuse_two_names(reader: Reader, block: Mapping[str, Any]) -> None:
    """One setting under two names has no right value where they differ."""
    for name in block:
        plain = name.removeprefix("stage3_")
        for other in {plain, _OLD_NAMES.get(name, name)} - {name}:
            if other in block and (name in _OLD_NAMES or block[other] != block[name]):
                raise reader.refusal(
                    f"zero_optimization.{name}", f"{other} sets the same; leave one of them out"
                )


def _offload(reader: Reader, name: str, value: Any, table: Mapping[str, Key]) -> None:
    def device(key: str, where: Any) -> None:
        _refuse_off_device(reader, key, reader.word(key, where, ("none", "cpu", "nvme")))
        reader.mapped(key, where, "state stays on the device")

    reader.walk(value, f"{name}.", table, {"device": device}, {"device": "it stays on the device"})


def _old_offload(reader: Reader, name: str, value: Any) -> None:
    _refuse_off_device(reader, name, "cpu" if reader.flag(name, value) else "none")
    reader.mapped(name, value, "state stays on the device")


def _refuse_off_device(reader: Reader, name: str, where: str) -> None:
    if where == "cpu":
        raise reader.refusal(
            name,
            "shard() keeps state on the device. To keep shards and the step on the host, call "
            "shardwise.fully_shard(model, offload_policy=CPUOffloadPolicy()), with the policy of "
            'torch.distributed.fsdp; to go on with shard(), give "none"',
        )
    if where == "nvme":
        raise reader.refusal(name, 'state on NVMe is not there yet; give "none"')
