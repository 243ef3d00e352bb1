"""What the installed DeepSpeed itself says, asked in a process of its own; and tables for it."""

import importlib.util
import json
import logging
import os
import warnings
from itertools import product
from typing import Any

import pytest
import torch

NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed, not installed here"
)
NUM_STEPS = 40

CURVES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 9, "warmup_min_lr": 1e-5, "warmup_max_lr": 0.3}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1, 2]}),
    ("WarmupDecayLR", {"total_num_steps": 31, "warmup_num_steps": 5}),
    (
        "WarmupDecayLR",
        {"total_num_steps": 25, "warmup_num_steps": 6, "warmup_type": "linear"}
        | {"warmup_min_lr": 0.01, "warmup_max_lr": 0.7},
    ),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 8}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 33, "warmup_num_steps": 4, "warmup_type": "linear"}
        | {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
    ),
    ("WarmupCosineLR", {"total_num_steps": 3, "warmup_num_steps": 5}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10}),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 7}
        | {"cycle_second_step_size": 11, "decay_step_size": 3, "decay_lr_rate": 0.5}
        | {"decay_mom_rate": 0.01, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95},
    ),
    (
        "OneCycle",
        {"cycle_min_lr": [0.01, 0.02], "cycle_max_lr": 0.1, "cycle_first_step_size": 9}
        | {"cycle_first_stair_count": 3, "cycle_second_stair_count": 2, "cycle_momentum": False},
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6}
        | {"cycle_second_step_size": 13, "cycle_first_stair_count": 4, "decay_step_size": 2},
    ),
    ("LRRangeTest", {}),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4}
        | {"lr_range_test_step_rate": 3.0, "lr_range_test_staircase": True},
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.01, 0.1], "lr_range_test_step_size": 3}),
]
SIZES = [(t, m, g, w) for t, m, g in product((None, 12, 7), (None, 2), (None, 3)) for w in (1, 2)]


def two_groups() -> torch.optim.Optimizer:
    """Return an optimizer with betas, and groups that start at different rates."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.4}], lr=0.2)


def follow(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[list[Any]]:
    """Return rate and momenta of both groups, as every update sees them."""
    seen = []
    for _ in range(NUM_STEPS):
        seen.append([(float(g["lr"]), tuple(g["betas"])) for g in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def ask_deepspeed(rank: int, world_size: int) -> dict[str, Any]:
    """Return fields of its models, its removed keys, its curves, its batch arithmetic."""
    warnings.simplefilter("ignore")  # not ours
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime import config as top
    from deepspeed.runtime import lr_schedules, precision_config
    from deepspeed.runtime.activation_checkpointing import config as checkpointing
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    logging.disable(logging.WARNING)
    models = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
        "zenflow": ZenFlowConfig,
    }
    fields = {
        name: sorted(
            set(model.model_fields) | {f.alias for f in model.model_fields.values() if f.alias}
        )
        for name, model in models.items()
    }
    fields["activation_checkpointing"] = sorted(checkpointing.ACT_CHKPT_DEFAULT)
    curves = []
    for name, options in CURVES:
        optimizer = two_groups()
        scheduler = getattr(lr_schedules, name)(optimizer, **options)
        curves.append(follow(optimizer, scheduler))
    removed = [
        *top._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{name}" for name in top._REMOVED_ZERO_CONFIG_KEYS),
    ]
    batches = [_resolve(top.DeepSpeedConfig, *sizes) for sizes in SIZES]
    return {"fields": fields, "curves": curves, "removed": removed, "batches": batches}


def _resolve(config: Any, total: Any, micro: Any, passes: Any, world_size: int) -> Any:
    made = config.__new__(config)
    made.train_batch_size, made.train_micro_batch_size_per_gpu = total, micro
    made.gradient_accumulation_steps, made.world_size = passes, world_size
    try:
        made._configure_train_batch_size()
    except AssertionError:
        return None
    return [
        made.train_micro_batch_size_per_gpu,
        made.gradient_accumulation_steps,
        made.train_batch_size,
    ]


def as_json(value: Any) -> Any:
    """Turn tuples into lists, and keep every bit of a float."""
    return json.loads(json.dumps(value))
