"""Files of DeepSpeed and accelerate that tests write, and their keys."""

import json

import yaml


def write(folder, content, name="ds.json"):
    """Write a file: text as it is, keys as JSON or YAML by the file's name."""
    path = folder / name
    if not isinstance(content, str):
        content = json.dumps(content) if name.endswith("json") else yaml.safe_dump(content)
    path.write_text(content)
    return path


def leaves(block, prefix=""):
    """Return the values of a file by their full names."""
    found = {}
    for key, value in block.items():
        inner = leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
        found |= inner or {f"{prefix}{key}": value}
    return found


def nested(path, value):
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


# transformers' documentation, "DeepSpeed", ZeRO-3; with the schedulers that its Trainer fills in.
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def hugging_face(schedule="WarmupLR"):
    """Return the file with nothing offloaded, and a curve."""
    content = json.loads(json.dumps(HUGGING_FACE))
    for name in ("offload_optimizer", "offload_param"):
        content["zero_optimization"][name]["device"] = "none"
    if schedule == "WarmupDecayLR":
        content["scheduler"]["type"] = schedule
        content["scheduler"]["params"]["total_num_steps"] = "auto"
    return content
