"""The table of precisions by dtype names, for the engine and for plans.

It imports no torch, because plans start without it.
"""

from dataclasses import dataclass
from typing import Literal

from shardwise.spelling import did_you_mean

FloatName = Literal["float32", "bfloat16", "float16"]
GatherName = Literal["int8", "fp8", "int4"]
ReduceName = Literal["int8-a2a", "fp8-a2a", "int4-a2a", "bf16-a2a"]
GATHER_BITS: dict[str, int] = {"int8": 8, "fp8": 8, "int4": 4}  # bits per element sent
REDUCE_FORMATS: dict[str, str] = {  # formats of encoded gradients, which are summed in float32
    **{f"{name}-a2a": name for name in GATHER_BITS},
    "bf16-a2a": "bf16",
}
BLOCK_MULTIPLE = 16  # of a block's elements

# Dtypes of full parameters, of trained shards, and of sums; None is each parameter's own.
PRECISION_DTYPES: dict[str, tuple[FloatName | None, FloatName | None, FloatName | None]] = {
    "fp32": (None, None, None),
    "bf16": ("bfloat16", "float32", "float32"),
    "fp16": ("float16", "float32", "float32"),
}
_OURS = {
    "fp32": ("float32", "float"),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half"),
}
_NAMES = {name: ours for ours, others in _OURS.items() for name in (ours, *others)}


@dataclass(frozen=True)
class Coding:
    """The encoding of matrices that are sent: the format, and the elements that share a scale."""

    format: str
    block: int

    def __str__(self) -> str:
        return f"{self.format}, blocks of {self.block}" if self.has_scales else self.format

    @property
    def has_scales(self) -> bool:
        """Return True if elements are codes with scales, and not bfloat16."""
        return self.format in GATHER_BITS

    def code_bytes(self, numel: int) -> int:
        """Return the bytes of one block's codes; two elements of 4 bits share one."""
        return -(-numel * GATHER_BITS[self.format] // 8)


def plain_precision(value: object) -> object:
    """Return our name for a precision: "bf16" for `torch.bfloat16` or "bfloat16".

    Other values are returned unchanged; the caller checks them.
    """
    is_name = isinstance(value, str) or type(value).__name__ == "dtype"
    text = str(value).strip().lower().removeprefix("torch.")
    return _NAMES.get(text, value) if is_name else value


def nearest_precision(value: object) -> str:
    """Return "; did you mean 'bf16'?" for a word spelt like one of our names, else ""."""
    return did_you_mean(value.lower(), _OURS, cutoff=0.8) if isinstance(value, str) else ""
