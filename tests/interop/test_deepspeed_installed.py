"""Against the installed DeepSpeed: its keys, curves, batch arithmetic, the losses of its engine."""

import importlib
import importlib.util
import json
import logging
import os
import warnings
from itertools import product

import pytest
import torch
from torch.nn import functional

from foreign_runs import nested
from ranks import run_ranks
from roundings import SMOOTH_EPS, assert_rounded_alike, of_gradient
from shardwise import accumulate, shard
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import from_deepspeed
from shardwise.interop.deepspeed.reading import resolve
from shardwise.interop.foreign_keys import REMOVED

# What the installed DeepSpeed itself says, asked in a process of its own; and tables for it.
NUM_STEPS = 40

CURVES = [
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
]
SIZES = [(t, m, g, w) for t, m, g in product((None, 12, 7), (None, 2), (None, 3)) for w in (1, 2)]


def of_deepspeed(test):
    """Mark a slow test that asks DeepSpeed."""
    is_there = importlib.util.find_spec("deepspeed") is not None
    skips = pytest.mark.skipif(not is_there, reason="needs DeepSpeed, not installed here")
    return pytest.mark.slow(skips(test))


def two_groups():
    """Return an optimizer with betas, and groups that start at different rates."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.4}], lr=0.2)


def follow(optimizer, scheduler):
    """Return rate and momenta of both groups, as every update sees them."""
    seen = []
    for _ in range(NUM_STEPS):
        seen.append([(float(g["lr"]), tuple(g["betas"])) for g in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def ask_deepspeed(rank, world_size):
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


def _resolve(config, total, micro, passes, world_size):
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


def as_json(value):
    """Turn tuples into lists, and keep every bit of a float."""
    return json.loads(json.dumps(value))


# Against the installed DeepSpeed: its keys, every step of its curves, its batch arithmetic.
PREFIXES = {
    "zero_optimization": "zero_optimization",
    "offload_param": "zero_optimization.offload_param",
    "offload_optimizer": "zero_optimization.offload_optimizer",
    "fp16": "fp16",
    "bf16": "bf16",
    "zenflow": "zero_optimization.zenflow",
    "activation_checkpointing": "activation_checkpointing",
}
GUESSES = (False, 1, "none", "fp32", {}, [], True)


@pytest.fixture(scope="module")
def facts():
    return run_ranks(ask_deepspeed, 1, fresh=True)[0]


def fates(path):
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


@of_deepspeed
def test_every_key_of_deepspeeds_models_is_mapped_ignored_or_refused(facts):
    unknown, without_effect = [], []
    for model, names in facts["fields"].items():
        for name in names:
            found = fates(f"{PREFIXES[model]}.{name}")
            unknown += [f"{model}.{name}"] if "unknown" in found else []
            if not found & {"mapped", "ignored"} and model != "zenflow":
                without_effect.append(f"{model}.{name}")
    assert not unknown
    # Whatever these say, they are not there; newer versions have dropped one.
    assert set(without_effect) - REMOVED.keys() == {"zero_optimization.zenflow"}
    assert fates("zero_optimization.stge") == {"unknown"}


@of_deepspeed
def test_every_key_that_deepspeed_removed_is_refused_with_what_to_use(facts):
    assert set(facts["removed"]) <= set(REMOVED)  # others in newer versions
    for path in REMOVED:
        with pytest.raises(ConfigError, match="newer DeepSpeed drops it") as caught:
            from_deepspeed(nested(path, {"enabled": False}))
        assert REMOVED[path] in str(caught.value)


@of_deepspeed
@pytest.mark.parametrize("number", range(len(CURVES)), ids=lambda n: f"{n}-{CURVES[n][0]}")
def test_a_scheduler_gives_every_update_deepspeeds_rate_to_the_bit(facts, number):
    name, options = CURVES[number]
    settings = from_deepspeed({"scheduler": {"type": name, "params": options}})
    optimizer = two_groups()
    assert as_json(follow(optimizer, settings.scheduler(optimizer))) == as_json(
        facts["curves"][number]
    )


@of_deepspeed
def test_two_sizes_of_a_batch_give_the_third_as_in_deepspeed(facts):
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


def test_a_schedule_goes_on_from_its_state():
    params = {"total_num_steps": 30, "warmup_num_steps": 8}
    settings = from_deepspeed({"scheduler": {"type": "WarmupCosineLR", "params": params}})
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


# One ds_config.json in the installed DeepSpeed's own engine and in ours: the same losses.
ENGINE_STEPS = 6
CONFIG = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.3,
    "optimizer": {
        "type": "AdamW",
        "params": {
            **{"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True},
            "eps": SMOOTH_EPS,  # Note [Losses after steps of Adam] in roundings.py
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 0.05},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 100},
}


def make_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    )


def micro_batch(rank, step, number):
    draw = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    x = torch.randn(4, 5, generator=draw)
    return x, x[:, :3].roll(1, 1) * 2


def theirs(rank, world_size):
    warnings.simplefilter("ignore")  # not ours
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    losses = []
    for step in range(ENGINE_STEPS):
        total = 0.0
        for number in range(3):
            x, y = micro_batch(rank, step, number)
            loss = functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.item() / 3
        losses.append(all_reduce_scalars([total])[0] / world_size)
    return losses


def ours(rank, world_size):
    settings = from_deepspeed(CONFIG)
    model = shard(make_model(), **settings.shard)
    optimizer = settings.optimizer(model.parameters())
    scheduler = settings.scheduler(optimizer)
    num_passes = settings.accumulation
    assert (settings.micro_batch, num_passes) == (4, 3)
    losses = []
    for step in range(ENGINE_STEPS):
        total = 0.0
        for number in range(num_passes):
            x, y = micro_batch(rank, step, number)
            with accumulate(model, last=number == num_passes - 1):
                loss = functional.mse_loss(model(x), y)
                (loss / num_passes).backward()
            total += loss.item() / num_passes
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(all_reduce_scalars([total])[0] / world_size)
    return losses


@of_deepspeed
def test_two_ranks_have_the_losses_of_deepspeeds_engine():
    found = run_ranks(ours, 2)
    expected = run_ranks(theirs, 2, fresh=True)
    assert found[0] == found[1]
    roundings = of_gradient(5, 16, 16, 3, over=2 * 3 * 4)  # of 2 ranks, 3 micro-batches of 4
    for step, (mine, wanted) in enumerate(zip(found[0], expected[0], strict=True)):
        assert_rounded_alike(mine, wanted, roundings, f"losses of step {step}")
    assert found[0][-1] < 0.7 * found[0][0]
