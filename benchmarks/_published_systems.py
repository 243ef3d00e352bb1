"""What each published system does with its bytes: one row of data per system, with its source.

A recipe says how many bytes of each kind of state a parameter has, which implementation of layer,
loss and attention runs, and what the memory column means. `Overhead` is the one thing that is
fitted: per system, never per row, on the rows that it names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from shardwise.plan.model.activations import Implementation
from shardwise.plan.model.execution import Checkpointing, LossKind

MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: compute copy, gradients, and what the optimizer has."""

    param: float
    grad: float
    optimizer: float


@dataclass(frozen=True)
class Overhead:
    """Bytes beside tensors: total = tensors x (1 + fraction) + constant; see ``fitted_on``."""

    fraction: float = 0.0
    constant: float = 0.0
    meaning: str = ""
    fitted_on: str = ""

    def is_fitted_on(self, row_id: str) -> bool:
        """Tell whether a row is named in ``fitted_on``: alone, or in a range (of even ones)."""
        number = _number(row_id)
        if number is None:
            return False
        if " .. " in self.fitted_on:
            low, high = (_number(part) or 0 for part in self.fitted_on.split(" .. "))
            return low <= number <= high and not ("even" in self.fitted_on and number % 2)
        return row_id in self.fitted_on.split()


def _number(text: str) -> int | None:
    found = re.search(r"R(\d+)", text)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class System:
    """One system. ``pattern`` is searched in the row's system cell, in lower case.

    ``full_layers``: layers beside the root of which a rank has full copies under stage 3.
    ``keeps_full``: parameters stay whole though they are sharded (measured, see the source).
    ``ddp_buckets``: DDP's gradient buckets lie beside the gradients. ``adapter_rank`` and
    ``adapter_state``: of LoRA runs, the rank and the bytes per adapter parameter.
    """

    name: str
    pattern: str
    state: StateBytes
    memory: MemoryKind
    source: str
    implementation: Implementation = "fused"
    compiled: Implementation = "compiled"
    loss: LossKind = "eager"
    compiled_loss: LossKind | None = None
    tp_loss: LossKind = "vocab_parallel"
    flash: bool = True
    dropout: bool = False
    checkpointing: Checkpointing = "none"
    selective: Checkpointing = "selective"  # what the word means there
    sequence_parallel: bool = False
    keeps_outputs: bool = False
    embedding_is_a_layer: bool = False
    full_layers: int = 2
    step_temporary: float = 4  # bytes per float32 parameter of an optimizer that is not fused
    keeps_full: bool = False
    ddp_buckets: bool = False
    accumulates: bool = False
    adapter_rank: int = 8
    adapter_state: float = 8
    chunks: int = 1  # interleaved chunks per pipeline stage where the row does not tell
    attention: float | None = None  # efficiency of its own kernel on Hopper and later
    hides_tensor_parallel: bool = False
    blocks_on_launches: bool = False  # CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel
    reduces_at_end: bool = False
    # ZeRO-1 sends out each rank's parameters in a broadcast of its own, one after the other.
    broadcast_s: float = 0.0
    slowdown: float = 1.0
    slowdown_meaning: str = ""
    overhead: Overhead = field(default_factory=Overhead)
    binary_unit: bool = False  # the column says GB and means GiB


MIXED = StateBytes(2, 2, 12)  # 16-bit compute and gradients, float32 master and moments
MIXED_FP32_GRADS = StateBytes(2, 4, 12)
FSDP_FP32 = StateBytes(4, 4, 8)  # the float32 shard is the master
PURE_BF16 = StateBytes(2, 2, 4)
# 16-bit gradients and a float32 copy to accumulate in, both whole; BF16_Optimizer of BigScience.
BF16_OPTIMIZER = StateBytes(2, 6, 12)
# ZeRO-1's step: the partition's gradients once in 16 bit and once in float32.
ZERO1_STEP = StateBytes(2, 2, 18)

SYSTEMS: tuple[System, ...] = (
    System(
        "torchtitan (torchao bench)",
        r"torchtitan.*torchao",
        FSDP_FP32,
        "reserved",
        "torchtitan metrics.py prints max_reserved_gib; 2025 recipe: loss compiled as the model",
        implementation="eager",
        compiled_loss="compiled",
        tp_loss="loss_parallel",
        sequence_parallel=True,
        binary_unit=True,
    ),
    System(
        "Llama 3 pre-training",
        r"meta llama",
        FSDP_FP32,
        "reserved",
        "arXiv 2407.21783 section 3.3: FSDP that keeps parameters, interleaved 1F1B",
        tp_loss="loss_parallel",
        sequence_parallel=True,
    ),
    System(
        "fms-fsdp",
        r"fms-fsdp",
        FSDP_FP32,
        "reserved",
        "fms-fsdp README: compiled; selective checkpointing recomputes whole blocks (HFU / MFU)",
        selective="full",
    ),
    System(
        "torchtitan, FSDP1/FSDP2 recipes",
        r"torchtitan|fsdp1 \(paper\)|flexshard|simplefsdp|vescale",
        FSDP_FP32,
        "reserved",
        "torchtitan metrics.py prints max_reserved_gib; fp32 parameters, bf16 compute; "
        "loss on logits.float(), not compiled",
        implementation="eager",
        tp_loss="loss_parallel",
        selective="per_op",
        sequence_parallel=True,
        keeps_outputs=True,
        binary_unit=True,
        overhead=Overhead(
            0.07, 0, "blocks that the caching allocator holds beyond the peak", "R001 R002 R006"
        ),
    ),
    System(
        "torchtune",
        r"torchtune",
        PURE_BF16,
        "allocated",
        "torchtune recipes: full bf16, AdamW; peak memory active, in GiB; LoRA rank 8",
        implementation="eager",
        binary_unit=True,
        checkpointing="full",
    ),
    System(
        "litgpt LoRA, several GPUs",
        r"litgpt lora.*multi",
        PURE_BF16,
        "allocated",
        "litgpt finetune/lora.py with FSDP: block checkpointing; frozen parameters stay gathered",
        implementation="eager_double_norm",
        checkpointing="full",
        keeps_full=True,
    ),
    System(
        "litgpt LoRA",
        r"litgpt lora",
        PURE_BF16,
        "allocated",
        "litgpt finetune/lora.py: bf16-true, torch.cuda.max_memory_allocated / 1e9",
        implementation="eager_double_norm",
    ),
    System(
        "litgpt full finetune, several GPUs",
        r"litgpt full.*multi",
        PURE_BF16,
        "allocated",
        "litgpt finetune/full.py with FSDP: block checkpointing; parameters stay gathered too",
        implementation="eager_double_norm",
        checkpointing="full",
        keeps_full=True,
        accumulates=True,
    ),
    System(
        "litgpt full finetune",
        r"litgpt full",
        PURE_BF16,
        "allocated",
        "litgpt finetune/full.py: bf16-true, max_memory_allocated / 1e9",
        implementation="eager_double_norm",
        accumulates=True,
    ),
    System(
        "litgpt pretrain, nvfuser",
        r"litgpt.*nvfuser",
        PURE_BF16,
        "allocated",
        "litgpt extensions/thunder: nvfuser keeps what eager keeps, but normed values in bf16",
        compiled="eager_repeat_kv",
    ),
    System(
        "litgpt pretrain",
        r"litgpt",
        PURE_BF16,
        "allocated",
        "litgpt extensions/thunder/pretrain.py: bf16-true, max_memory_allocated / 1e9",
        implementation="eager_double_norm",
        ddp_buckets=True,
    ),
    System(
        "Lightning Fabric",
        r"lightning fabric",
        FSDP_FP32,
        "allocated",
        "Lightning's FSDP guide: torch.cuda.memory_summary (MB are MiB), Adam of torch 2.0, which "
        "makes the square roots and then the denominators of all parameters",
        ddp_buckets=True,
        step_temporary=8,
        binary_unit=True,
    ),
    System(
        "InternEvo",
        r"internevo",
        StateBytes(2, 2, 16),
        "device",
        "InternEvo HybridZeroOptimizer: fp32 master, moments and gradients of the partition; "
        "fused norms and cross-entropy",
        loss="compiled",
        tp_loss="compiled",
        broadcast_s=2.6e-3,
        slowdown=1.08,
        slowdown_meaning="kernels and launches that the tape does not have; median of R354 .. R400",
        overhead=Overhead(
            0.12,
            12.5e9,
            "context, NCCL, cached blocks, 512 MiB buckets; not explained by tensors",
            "R338 R340 R341 R346 R353",
        ),
    ),
    System(
        "Megatron-DeepSpeed (BigScience)",
        r"bigscience",
        ZERO1_STEP,
        "device",
        "DeepSpeed 0.5/0.6 stage_1_and_2.py, bf16_optimizer.py, pipe/engine.py: buffers keep a "
        "stage's output; layers split by type:transformer|embedding; CUDA_LAUNCH_BLOCKING=1 "
        "(bigscience train/tr11-176B-ml/tr11-176B-ml.slurm)",
        loss="vocab_parallel",
        flash=False,
        dropout=True,
        keeps_outputs=True,
        embedding_is_a_layer=True,
        reduces_at_end=True,
        blocks_on_launches=True,
        slowdown=1.13,
        slowdown_meaning="its pipeline engine waits for each send; median of R407 .. R497",
        overhead=Overhead(
            0.07,
            2.1e9,
            "fragmentation; context, NCCL of 4 groups, 1 GB reduce bucket",
            "even rows of R407 .. R497 with a figure, least absolute relative error",
        ),
    ),
    System(
        "Megatron-LM on V100 (gpt2.md)",
        r"megatron-lm ds 3d|megatron-lm megatron only",
        StateBytes(2, 2, 16),
        "device",
        "bigscience experiments/gpt2.md: Megatron-LM with and without DeepSpeed",
        loss="vocab_parallel",
        flash=False,
        dropout=True,
        keeps_outputs=True,
        overhead=Overhead(0.0, 4e9, "context, NCCL and cached blocks", "R519 R520 R521 R522"),
    ),
    System(
        "Megatron-FSDP",
        r"megatron-fsdp",
        MIXED_FP32_GRADS,
        "allocated",
        "Megatron-Core custom FSDP: ZeRO-3 over the group; cuDNN attention, about 1.75 times "
        "FlashAttention-2 (arXiv 2407.08608, abstract)",
        loss="vocab_parallel",
        attention=0.60,
    ),
    System(
        "Megatron-LM (before flash attention)",
        r"korthikanti|vtrain",
        MIXED,
        "allocated",
        "Megatron-LM and Megatron-DeepSpeed of 2021/22: fused softmax, dropout, fp16",
        loss="vocab_parallel",
        flash=False,
        dropout=True,
        keeps_outputs=True,
    ),
    System(
        "Megatron-LM",
        r"megatron",
        MIXED_FP32_GRADS,
        "allocated",
        "Megatron-LM dist_optimizer.md: 18 or 6 + 12/d bytes per parameter; 5 chunks: the "
        "performance recipes of Megatron-Bridge for Llama-3-70B; cuDNN attention, as above",
        chunks=5,
        hides_tensor_parallel=True,
        attention=0.60,
        loss="vocab_parallel",
        sequence_parallel=True,
    ),
    System(
        "llm-foundry (Composer, FSDP1)",
        r"llm-foundry|mosaic|composer",
        FSDP_FP32,
        "reserved",
        "llm-foundry: FSDP1, mixed precision PURE/DEFAULT, flash attention, no dropout; "
        "loss_fn fused_crossentropy, which writes the gradient in the logits' dtype",
        loss="compiled",
    ),
    System(
        "ColossalAI",
        r"colossal",
        MIXED,
        "allocated",
        "ColossalAI low-level ZeRO: 16-bit parameters, fp32 master and moments",
        checkpointing="full",
    ),
    System(
        "Qwen finetune",
        r"qwen finetune",
        StateBytes(2, 2, 14),
        "device",
        "Qwen finetune.py: HF Trainer, DeepSpeed, bf16, flash-attention 2; LoRA rank 64",
        implementation="eager_repeat_kv",
        loss="transformers",
        checkpointing="full",
        adapter_rank=64,
        adapter_state=16,
        overhead=Overhead(0.0, 2e9, "context, NCCL, ZeRO's gather and reduce buffers", "R601 R607"),
    ),
    System(
        "HF Trainer / Accelerate on small cards",
        r"accelerate|^ddp|hf trainer",
        FSDP_FP32,
        "device",
        "transformers GPT-2: gelu_new in eager PyTorch, eager attention, dropout 0.1",
        implementation="eager_tanh_gelu",
        loss="transformers",
        flash=False,
        dropout=True,
        ddp_buckets=True,
        overhead=Overhead(
            0.1, 1.5e9, "cached blocks; context, NCCL and cuBLAS workspaces", "R625 .. R635"
        ),
    ),
    System(
        "DeepSpeed and other ZeRO",
        r"deepspeed|fairscale|zero|superoffload|torchao",
        MIXED,
        "reserved",
        "DeepSpeed zero/stage3.py: 16-bit parameters and gradients, fp32 master and moments",
        implementation="eager_repeat_kv",
        loss="transformers",
        overhead=Overhead(0.12, 0, "blocks that the caching allocator holds", "R585 R586"),
    ),
)
_DEFAULT = System("other", r"", MIXED, "reserved", "ZeRO paper: 2 + 2 + 12 bytes per parameter")


def system_of(name: str) -> System:
    """Return the first system whose pattern is in a name, or ZeRO's own recipe."""
    lower = name.lower()
    return next((s for s in SYSTEMS if re.search(s.pattern, lower)), _DEFAULT)
