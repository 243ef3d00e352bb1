"""The blocks of a DeepSpeed file: ``zero_optimization``, and keys that stand alone."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardwise.interop.deepspeed.homes import Homes, Kind
from shardwise.interop.deepspeed.reading import Handler, Reader
from shardwise.interop.foreign_keys import (
    ACTIVATION_CHECKPOINTING,
    DATA_TYPES,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    TORCH_AUTOCAST,
    ZERO,
)

DEFAULT_CLIPPING = 1.0  # of DeepSpeed since 0.19; it was 0 before

_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_LARGEST_PREFETCH = 1 << 40
_DTYPES = ("fp32", "fp16", "bf16")
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


def read_zero(reader: Reader, block: Any, precision: str | None) -> dict[str, Any]:
    """Return ``stage`` and ``prefetch_bytes``, where they are given, as ``shard()`` takes them.

    ``offload`` too, as a plan or a run has it, and ``gather`` and ``reduce`` of the precision.
    """
    whole = "zero_optimization"
    if block is None or isinstance(block, bool):
        stage = 1 if block else 0
        reader.mapped(whole, block, f"shard(stage={stage})")
        return {"stage": stage}
    block = reader.mapping(whole, block)
    _refuse_two_names(reader, block)
    otherwise = "bf16" if reader.plans else "fp32"  # as the flags' default, and shard()'s, is
    found: dict[str, Any] = {}
    homes = Homes(reader)

    def take_stage(name: str, value: Any) -> None:
        found["stage"] = stage_of(reader, name, value)
        reader.mapped(name, value, f"shard(stage={found['stage']})")

    def prefetch(name: str, value: Any) -> None:
        elements = reader.integer(name, value)
        if elements > _LARGEST_PREFETCH:
            raise reader.refusal(name, f"expected at most {_LARGEST_PREFETCH:,}, got {value!r}")
        found["prefetch_bytes"] = elements * _COMPUTE_BYTES[precision or otherwise]
        reader.mapped(name, value, f"shard(prefetch_bytes={found['prefetch_bytes']})")

    def quantized(ours: str, kind: str, otherwise: str, name: str, value: Any) -> None:
        if not reader.flag(name, value):
            reader.mapped(name, value, otherwise)
        elif str(block.get("stage")) not in ("3", "auto"):
            reader.ignored(name, value, "DeepSpeed quantizes at stage 3 alone")
        else:
            found[ours] = kind
            reader.mapped(name, value, f"Precision({ours}={kind!r}), for shard()")

    def zenflow(name: str, value: Any) -> None:
        raise reader.refusal(name, "it approximates the step; not there; leave it out")

    handlers: dict[str, Handler] = {
        "stage": take_stage,
        "prefetch_bucket_size": prefetch,
        "stage3_prefetch_bucket_size": prefetch,
        **dict.fromkeys(("offload_param", "offload_optimizer"), partial(_offload, reader, homes)),
        **dict.fromkeys(("cpu_offload", "cpu_offload_param"), partial(_old_offload, reader, homes)),
        "zenflow": zenflow,
        "zero_quantized_weights": partial(
            quantized, "gather", "int8", "parameters travel in the dtype of computation"
        ),
        "zero_quantized_gradients": partial(
            quantized, "reduce", "int4-a2a", "gradients travel as they come"
        ),
    }
    reader.walk(block, f"{whole}.", ZERO, handlers, _AUTOS)
    if "stage" not in block:
        reader.add("default", f"{whole}.stage", 0, "shard(stage=0)")
    if block.get("stage") != "auto":  # which leaves it to shard()
        found.setdefault("stage", 0)
    offload = homes.settle(found.get("stage"))
    return found if offload is None else {**found, "offload": offload}


def _refuse_two_names(reader: Reader, block: Mapping[str, Any]) -> None:
    """One setting under two names has no right value where they differ."""
    for name in block:
        plain = name.removeprefix("stage3_")
        for other in {plain, _OLD_NAMES.get(name, name)} - {name}:
            if other in block and (name in _OLD_NAMES or block[other] != block[name]):
                raise reader.refusal(
                    f"zero_optimization.{name}", f"{other} sets the same; leave one of them out"
                )


def stage_of(reader: Reader, name: str, value: Any) -> int:
    """Return a stage of ZeRO. **Raises** ConfigError where there is no such one."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or number not in (0, 1, 2, 3):
        raise reader.refusal(name, f"expected 0, 1, 2 or 3, got {value!r}")
    return int(number)


def _offload(reader: Reader, homes: Homes, name: str, block: Any) -> None:
    kind: Kind = "params" if name.endswith("offload_param") else "optimizer"
    handlers: dict[str, Handler] = {
        "device": partial(homes.note_device, kind),
        "nvme_path": partial(homes.note_path, kind),
        "ratio": homes.note_ratio,
    }
    table = OFFLOAD_PARAM if kind == "params" else OFFLOAD_OPTIMIZER
    reader.walk(block, f"{name}.", table, handlers, {"device": "it stays on the device"})


def _old_offload(reader: Reader, homes: Homes, name: str, value: Any) -> None:
    kind: Kind = "params" if name.endswith("param") else "optimizer"
    homes.note_device(kind, name, reader.flag(name, value))


def other_handlers(reader: Reader, found: dict[str, Any]) -> dict[str, Handler]:
    """Return what takes these keys; what a loop needs of them goes into ``found``."""

    def clipping(name: str, value: Any) -> None:
        found["gradient_clipping"] = float(reader.number(name, value, least=0))
        reader.mapped(name, value, "the largest norm, for clip_grad_norm_()")

    def mean(name: str, value: Any) -> None:
        if reader.word(name, value, ("mean", "sum")) == "sum":
            raise reader.refusal(
                name, "gradients are the mean over ranks; multiply the loss by their number"
            )
        reader.mapped(name, value, "gradients are the mean over ranks")

    def checkpointing(name: str, value: Any) -> None:
        found["activation_checkpointing"] = reader.mapping(name, value)
        reader.walk(value, f"{name}.", ACTIVATION_CHECKPOINTING, {}, {})

    return {
        "gradient_clipping": clipping,
        "gradient_allreduce_op": mean,
        "communication_data_type": partial(_sums, reader),
        "data_types": partial(_data_types, reader),
        "torch_autocast": partial(_autocast, reader),
        "activation_checkpointing": checkpointing,
        "sequence_parallel_size": partial(_only_one, reader),
        "tensor_parallel": partial(_tensor_parallel, reader),
        "expert_parallel": partial(_must_be_off, reader, "experts are sharded like all"),
        "data_efficiency": partial(_must_be_off, reader, "sampling is the loader's"),
    }


def _sums(reader: Reader, name: str, value: Any) -> None:
    if reader.word(name, value, _DTYPES) == "fp32":
        reader.mapped(name, value, "gradients travel and are summed in fp32")
    else:
        reader.ignored(name, value, "gradients travel and are summed in fp32, which is finer")


def _data_types(reader: Reader, name: str, block: Any) -> None:
    def kept(key: str, value: Any) -> None:
        if value:
            raise reader.refusal(key, 'all parameters compute in one dtype; give "auto" or []')
        reader.ignored(key, value, "an empty list")

    handlers: dict[str, Handler] = {
        "grad_accum_dtype": partial(_sums, reader),
        "keep_in_fp32_modules": kept,
    }
    autos = {"keep_in_fp32_modules": "buffers keep their dtype"}
    reader.walk(block, f"{name}.", DATA_TYPES, handlers, autos)


def _autocast(reader: Reader, name: str, block: Any) -> None:
    def enabled(key: str, value: Any) -> None:
        if reader.flag(key, value):
            raise reader.refusal(
                key, "enter torch.autocast around the forward pass and leave this out, or use bf16"
            )
        reader.mapped(key, value, "off")

    reader.walk(block, f"{name}.", TORCH_AUTOCAST, {"enabled": enabled}, {})


def _only_one(reader: Reader, name: str, value: Any) -> None:
    if reader.integer(name, value) > 1:
        raise reader.refusal(name, f"only data is parallel here; expected 1, got {value!r}")
    reader.mapped(name, value, "only data is parallel")


def _tensor_parallel(reader: Reader, name: str, block: Any) -> None:
    values = reader.mapping(name, block)
    inner = values.get("tp", values.get("tensor_parallel"))
    sizes = [values.get("autotp_size", 0), values.get("tp_size", 0)]
    sizes.append(inner.get("tp_size", 1) if isinstance(inner, Mapping) else 1)
    if any(isinstance(size, int) and size > 1 for size in sizes):
        raise reader.refusal(name, "only data is parallel here; leave it out")
    reader.mapped(name, block, "only data is parallel")


def _must_be_off(reader: Reader, why: str, name: str, block: Any) -> None:
    if reader.mapping(name, block).get("enabled", False):
        raise reader.refusal(name, f"it is not there: {why}; turn it off")
    reader.ignored(name, block, "off")
