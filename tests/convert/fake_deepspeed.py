"""Writes folders as DeepSpeed 0.19 writes them, without DeepSpeed, from tensors that are known.

What is in which file was seen in checkpoints that DeepSpeed itself had written; test_deepspeed.py
compares with those where DeepSpeed is installed.
"""

import sys
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch

Named = dict[str, torch.Tensor]
STATES = ("exp_avg", "exp_avg_sq")


class ZeroStageEnum(IntEnum):
    """The name under which the stage is pickled."""

    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """The name under which the loss scale is pickled."""

    def __init__(self):
        self.cur_scale, self.dynamic = 1.0, False


class fragment_address:  # noqa: N801 - DeepSpeed's own name
    """The name under which DeepSpeed pickles a range."""

    def __init__(self, numel, start):
        self.numel, self.start = numel, start


_HOMES = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def deepspeed_names():
    """Let the classes above be pickled as if they were DeepSpeed's."""
    parts = [home.split(".") for home in _HOMES.values()]
    modules = {".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update({name: ModuleType(name) for name in modules})
    for kind, home in _HOMES.items():
        setattr(sys.modules[home], kind.__name__, kind)
        kind.__module__ = home
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


@dataclass
class Run:
    """What a training run would have in memory; the tensors are fp32 and whole."""

    groups: list[Named]
    frozen: Named
    buffers: Named
    tied: dict[str, str]
    states: dict[str, Named]  # by key, then by parameter
    step: Any = 7.0
    client: dict[str, Any] = field(default_factory=lambda: {"note": "hello", "n": [1, 2.5]})


def make_run(dtype=torch.bfloat16):
    """Return a run with uneven sizes, a frozen and a tied parameter, buffers and two groups."""

    def random(*shape):
        return torch.randn(shape)

    groups = [
        {"emb.weight": random(11, 6), "body.weight": random(5, 6), "one": random(1)},
        {
            "body.bias": random(5),
            "norm.weight": random(7),
            "empty": random(0),
            "cube": random(2, 3, 2),
        },
    ]
    names = [(name, tensor.shape) for group in groups for name, tensor in group.items()]
    return Run(
        groups,
        {"frozen.weight": random(4, 4).to(dtype), "frozen.bias": random(5).to(dtype)},
        {"norm.mean": random(7), "count": torch.tensor(3)},
        {"head.weight": "emb.weight"},
        {key: {name: random(*shape) for name, shape in names} for key in STATES},
    )


def write(folder, run, stage, world, tag="step7"):
    """Write all files of a tag, and ``latest``; return the tag's folder."""
    home = folder / tag
    home.mkdir(parents=True)
    make = _stage3 if stage == 3 else _stage12
    with deepspeed_names():
        for rank in range(world):
            saved = {"optimizer_state_dict": make(run, stage, world, rank), "ds_version": "0.19.8"}
            torch.save(saved, home / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            if stage == 3:
                name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                torch.save(_model(run, stage, world, rank), home / name)
        if stage < 3:
            torch.save(_model(run, stage, world, 0), home / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(tag)
    return home


def _model(run, stage, world, rank):
    trained = {name: tensor for group in run.groups for name, tensor in group.items()}
    module = OrderedDict(run.buffers)
    for name, tensor in {**trained, **run.frozen}.items():
        half = tensor.to(torch.bfloat16)
        module[name] = half.flatten()[:0] if stage == 3 else half
    for name, target in run.tied.items():
        module[name] = module[target]
    module._metadata = OrderedDict({"": {"version": 1}})  # as a module's state_dict has it
    units = _sub_groups(run) if stage == 3 else run.groups
    shapes = {name: tensor.shape for name, tensor in run.frozen.items()}
    fragments = {
        name: _share(tensor, world, rank) if stage == 3 else tensor
        for name, tensor in run.frozen.items()
    }
    return {
        "module": module,
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, t.shape) for n, t in unit.items()) for unit in units],
        "frozen_param_shapes": None if stage == 1 else OrderedDict(shapes),
        "frozen_param_fragments": None if stage == 1 else OrderedDict(fragments),
        "shared_params": run.tied if rank == 0 else {},
        "lr_scheduler": {"last_batch_iteration": 2},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 7,
        "global_samples": 56,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
        "ds_version": "0.19.8",
        **run.client,
    }


def _stage12(run, stage, world, rank):
    masters, states, slices, paddings = [], {}, [], []
    for number, group in enumerate(run.groups):
        numel = sum(tensor.numel() for tensor in group.values())
        share = -(-numel // (2 * world)) * 2  # parts begin at multiples of four bytes
        lo, hi = rank * share, (rank + 1) * share
        padding = min(max(hi - numel, 0), share)
        masters.append(_padded(group.values(), share * world)[lo : hi - padding].clone())
        whole = {k: _padded([run.states[k][n] for n in group], share * world) for k in run.states}
        states[number] = _state(run, {k: flat[lo:hi].clone() for k, flat in whole.items()})
        slices.append(OrderedDict(_addresses(group, lo, hi)))
        paddings.append(padding)
    return {
        "loss_scaler": LossScaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": states, "param_groups": _options([[0], [1]])},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": ZeroStageEnum(stage),
        "group_paddings": paddings,
        "partition_count": [world] * len(run.groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": slices,
    }


def _stage3(run, stage, world, rank):
    units = _sub_groups(run)
    masters = [torch.cat([_share(t, world, rank) for t in unit.values()]) for unit in units]
    states = {}
    for number, unit in enumerate(units):
        parts = {
            key: torch.cat([_share(run.states[key][name], world, rank) for name in unit])
            for key in run.states
        }
        states[number] = _state(run, parts)
    return {
        "zero_stage": ZeroStageEnum(stage),
        "loss_scaler": LossScaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": world,
        "optimizer_state_dict": {"state": states, "param_groups": _options(_numbers(run))},
        "fp32_flat_groups": masters,
    }


def _state(run, parts):
    if run.step is None:  # before the optimizer's first step
        return {}
    step = torch.tensor(run.step) if isinstance(run.step, float) else run.step
    return {"step": step, **parts}


def _options(numbers):
    return [
        {"lr": 0.5, "betas": (0.9, 0.999), "weight_decay": 0.1 * i, "params": params}
        for i, params in enumerate(numbers)
    ]


def _numbers(run):
    """Return the numbers of each group's sub-groups."""
    numbers, at = [], 0
    for group in run.groups:
        numbers.append(list(range(at, at + -(-len(group) // 2))))
        at = numbers[-1][-1] + 1
    return numbers


def _sub_groups(run):
    """Two parameters to a sub-group."""
    units = []
    for group in run.groups:
        names = list(group)
        units += [{n: group[n] for n in names[i : i + 2]} for i in range(0, len(names), 2)]
    return units


def _share(tensor, world, rank):
    share = -(-tensor.numel() // world)
    return _padded([tensor], share * world)[rank * share : (rank + 1) * share].clone()


def _padded(tensors, numel):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return torch.cat([flat, torch.zeros(numel - flat.numel(), dtype=flat.dtype)])


def _addresses(group, lo, hi):
    at = 0
    for name, tensor in group.items():
        begin, end = max(at, lo), min(at + tensor.numel(), hi)
        if begin < end:
            yield name, fragment_address(end - begin, begin - lo)
        at += tensor.numel()
