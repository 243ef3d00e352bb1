"""The keys of a DeepSpeed file that stand alone: clipping, dtypes of sums, other parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.reading import Handler, Reader
from shardwise.plan.foreign_keys import Key

DEFAULT_CLIPPING = 1.0  # of DeepSpeed since 0.19; it was 0 before

_YOURS = "torch.utils.checkpoint is the model's to call"
_DTYPES = ("fp32", "fp16", "bf16")
ACTIVATION_CHECKPOINTING: dict[str, Key] = {
    "partition_activations": Key("flag", "", "there are no tensor-parallel ranks to cut them over"),
    "cpu_checkpointing": Key(
        "flag", "", "call the model under torch.autograd.graph.save_on_cpu() for that"
    ),
    **dict.fromkeys(
        ("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"),
        Key("flag", "", _YOURS),
    ),
    "number_checkpoints": Key("whole", "", _YOURS),
}
DATA_TYPES: dict[str, Key] = {
    "grad_accum_dtype": Key("any", "", ""),
    "param_dtype": Key("word", "", "the compute dtype is that of bf16 or fp16"),
    "buffer_dtype": Key("word", "", "buffers keep their dtype"),
    "keep_in_fp32_modules": Key("any", "", ""),
}
TORCH_AUTOCAST: dict[str, Key] = {
    "enabled": Key("any", "", ""),
    "dtype": Key("word", "", "torch.autocast is yours to enter"),
    "lower_precision_safe_modules": Key("any", "", "torch.autocast is yours to enter"),
}


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
        "communication_data_type": lambda name, value: _sums(reader, name, value),
        "data_types": lambda name, value: _data_types(reader, name, value),
        "torch_autocast": lambda name, value: _autocast(reader, name, value),
        "activation_checkpointing": checkpointing,
        "sequence_parallel_size": lambda name, value: _only_one(reader, name, value),
        "tensor_parallel": lambda name, value: _tensor_parallel(reader, name, value),
        "expert_parallel": lambda name, value: _must_be_off(
            reader, name, value, "experts are sharded like all"
        ),
        "data_efficiency": lambda name, value: _must_be_off(
            reader, name, value, "sampling is the loader's"
        ),
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
        "grad_accum_dtype": lambda key, value: _sums(reader, key, value),
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
    if reader.whole(name, value) > 1:
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


def _must_be_off(reader: Reader, name: str, block: Any, why: str) -> None:
    if reader.mapping(name, block).get("enabled", False):
        raise reader.refusal(name, f"it is not there: {why}; turn it off")
    reader.ignored(name, block, "off")
