"""What each published system does by default: `data/systems.toml`, read and checked.

A system's defaults fill in what a row does not tell (`_published_flags`). Nothing in here is
fitted; what is fitted is in `_published_constants`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal

from shardwise.plan.model.activations import Checkpointing, Implementation, LossKind

TABLE = Path(__file__).parent / "data" / "systems.toml"
MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: compute copy, gradients, master weights, and both moments."""

    param: float
    grad: float
    master: float
    moments: float

    @property
    def optimizer(self) -> float:
        """Bytes of all that the optimizer has."""
        return self.master + self.moments


POLICIES: dict[str, StateBytes] = {
    "mixed": StateBytes(2, 2, 4, 8),  # ZeRO (arXiv:1910.02054, section 3.1)
    "mixed_fp32_grads": StateBytes(2, 4, 4, 8),  # Megatron Core, distributed optimizer
    "fp32_master": StateBytes(4, 4, 0, 8),  # FSDP: the float32 shard is the master
    "fp32": StateBytes(4, 4, 0, 8),
    "autocast": StateBytes(6, 4, 0, 8),  # the float32 parameters and autocast's cached copies
    "pure": StateBytes(2, 2, 0, 4),
    "bf16_moments": StateBytes(2, 2, 4, 4),  # Megatron's precision-aware optimizer
    "bf16_master": StateBytes(2, 2, 2, 4),
    "fp32_partition": StateBytes(2, 2, 8, 8),  # float32 gradients of the partition beside masters
    "zero1_step": StateBytes(2, 2, 10, 8),  # the partition's gradients in 16 bit and in float32
    "bf16_optimizer": StateBytes(2, 6, 4, 8),  # BigScience: 16-bit gradients and float32 sums
    "zero_buckets": StateBytes(2, 2, 6, 8),  # gradients of the partition once more in 16 bit
}


@dataclass(frozen=True)
class System:
    """One system's defaults; see the head of ``data/systems.toml``.

    ``full_layers``: layers beside the root of which a rank has full copies under stage 3.
    ``whole_root``: embedding and head are one unit, as FSDP's automatic wrapping makes them.
    ``keeps_full``: parameters stay whole though they are sharded. ``ddp_buckets``: DDP's gradient
    buckets lie beside the gradients. ``adapter_*``: of LoRA runs, rank, bytes per adapter
    parameter, and bytes of each parameter of a quantized model that is not quantized;
    ``float32_adapters``: they read their inputs in float32.
    ``by_transformers``: layers as transformers writes them, GPT-2's with eager attention.
    """

    name: str
    pattern: str
    policy: str
    memory: MemoryKind
    source: str
    policy_bfloat16: str = ""
    policy_stage3: str = ""
    stage: int = 0
    implementation: Implementation = "fused"
    compiled: Implementation = "compiled"
    loss: LossKind = "eager"
    compiled_loss: LossKind | None = None
    tp_loss: LossKind = "vocab_parallel"
    flash: bool = True
    dropout: bool = False
    by_transformers: bool = False
    autocast: bool = False  # weights stay float32; autocast caches 16-bit ones
    checkpointing: Checkpointing = "none"
    selective: Checkpointing = "selective"  # what the word means there
    sequence_parallel: bool = False
    keeps_outputs: bool = False
    embedding_is_a_layer: bool = False
    full_layers: int = 2
    step_temporary: float = 4  # bytes per float32 parameter of an optimizer that is not fused
    step_in_backward: bool = False
    paged_optimizer: bool = False
    keeps_full: bool = False
    whole_root: bool = False
    ddp_buckets: bool = False
    accumulates: bool = False
    adapter_rank: int = 8
    adapter_state: float = 8
    adapter_rest: float = 2
    float32_adapters: bool = False
    chunks: int = 1  # interleaved chunks per pipeline stage where the row does not tell
    attention: float | None = None  # efficiency of its own kernel on Hopper and later
    hides_tensor_parallel: bool = False
    blocks_on_launches: bool = False  # CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel
    reduces_at_end: bool = False
    broadcasts: bool = False  # ZeRO-1 sends out each rank's parameters in a broadcast of its own
    binary_unit: bool = False  # the column says GB and means GiB

    def states(self, told: str | None, dtype: str, stage: int) -> StateBytes:
        """Return the copies of a parameter: as a row tells, or as the system has them."""
        if told == "fp32" or (dtype == "float32" and told is None):
            return POLICIES["fp32"]
        if told in ("pure", "bf16_master"):
            return POLICIES[told]
        own = self.policy_stage3 if stage >= 3 and self.policy_stage3 else self.policy
        if dtype == "bfloat16" and self.policy_bfloat16:
            own = self.policy_bfloat16
        # "fp16" or "float32 states" say nothing that a system with master weights does not do.
        takes = told in ("mixed", "mixed_fp32_grads") and own in ("pure", "fp32_master")
        if self.autocast and dtype != "float32" and own == "fp32_master":
            return POLICIES["autocast"]
        return POLICIES[told if takes and told else own]


@cache
def systems(path: Path = TABLE) -> tuple[System, ...]:
    """Read the table. **Raises** TypeError for a key that is none."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))["system"]
    known = {f.name for f in fields(System)}
    for each in found:
        if unknown := set(each) - known:
            raise TypeError(f"{path.name}: {each.get('name')}: unknown {sorted(unknown)}")
    return tuple(System(**each) for each in found)


_DEFAULT = System("other", "", "mixed", "reserved", "ZeRO paper: 2 + 2 + 12 bytes per parameter")


def system_of(text: str) -> System:
    """Return the first system whose pattern is in a text, or ZeRO's own recipe."""
    return next((s for s in systems() if re.search(s.pattern, text.lower())), _DEFAULT)
