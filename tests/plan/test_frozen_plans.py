"""Plans of many presets, degrees and settings have the figures of `frozen_plans.json`.

The file is rewritten by ``python tests/plan/test_frozen_plans.py``. Rewrite it only when a plan's
figures are meant to change, and read the difference.
"""

import json
from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest

from shardwise.homes import Offload
from shardwise.plan import Candidate
from shardwise.plan.facts import plan_facts
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.model.presets import find_preset
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import Experts, Latent, llama_shape
from shardwise.plan.planning import plan

FIGURES = Path(__file__).with_name("frozen_plans.json")
SMALL = llama_shape(4, 1024, 8, 2, 2816, 32_000)
SHAPES = {
    "small": SMALL,
    "tied": replace(SMALL, tied=True),
    "one layer": replace(SMALL, layers=1),
    "biases, head norms": replace(SMALL, bias=True, qkv_bias=True, qk_norm=True),
    "experts": replace(SMALL, experts=Experts(8, 2, 1408)),
    "shared experts": replace(SMALL, experts=Experts(16, 4, 704, shared=2, dense_layers=1)),
    "latent": replace(SMALL, kv_heads=8, latent=Latent(256, 384, 64, 32, 64)),
}
CPU = {"transport": "point_to_point"}
FULL = {"activation_checkpointing": "full"}
FIRST = {"loss": "fused", "micro_batch": 8}  # so that of a pipeline the first stage has the most
HOST = Offload(optimizer="cpu", params="cpu")
FILES = Offload(optimizer="nvme", params="nvme")
# The model, and what the candidate has; 8 shards if it does not say.
CELLS = [
    *((name, {}) for name in ("llama-3-8b", "gpt2-xl", "qwen3-8b", "gemma-2b", "mpt-7b")),
    *((name, {"stage": 1, "kernels": "compiled", "loss": "fused"}) for name in SHAPES),
    *((name, {"precision": "fp32", "micro_batch": 2, **FULL}) for name in SHAPES),
    *(("small", {"stage": stage, "accumulation": 2, **CPU}) for stage in range(4)),
    *(("small", {"layout": layout, "num_replicas": 2}) for layout in ("rows", "flat", "matrices")),
    *(("small", {"precision": p, "optimizer": "adam"}) for p in ("fp16", "bf16", "fp32")),
    *(
        ("small", {"loss": loss, "kernels": kernels, "activation_checkpointing": "per_op"})
        for loss in ("eager", "held", "freed", "chunked", "compiled", "loss_parallel", "fused")
        for kernels in ("eager", "compiled")
    ),
    *(("small", {"cp": 2, "cp_method": m, **FULL}) for m in ("gather", "heads", "ring")),
    *(("small", {"cp": 2, "cp_method": m, **CPU}) for m in ("gather", "ring")),
    *(
        ("small", {"pp": pp, "pp_schedule": s, "accumulation": 4})
        for pp in (2, 4)
        for s in ("1f1b", "gpipe")
    ),
    ("small", {"pp": 4, "accumulation": 2, **FIRST}),
    ("latent", {"tp": 2}),
    ("tied", {"tp": 2, "pp": 2, "accumulation": 3, "kernels": "compiled"}),
    *(("experts", {"ep": ep, "tp": tp}) for ep, tp in ((2, 1), (8, 2), (1, 2))),
    ("shared experts", {"ep": 4, "tp": 2, "pp": 2, "accumulation": 2, **FULL}),
    ("small", {"tp": 2, "stage": 2, "precision": "fp32"}),
    *(("small", {"gather": "fp8", "reduce": r}) for r in (None, "int4-a2a", "bf16-a2a")),
    ("small", {"gather": "int8", "reduce": "fp8-a2a", "num_replicas": 2, **CPU}),
    ("small", {"offload": HOST, "accumulation": 2}),
    ("small", {"offload": HOST, "num_shards": 1}),
    ("small", {"offload": HOST, "stage": 2, "precision": "fp32", **CPU}),
    ("small", {"offload": replace(HOST, step_on="device")}),
    ("small", {"offload": replace(HOST, params="device", fraction=0.5), "stage": 2}),
    ("small", {"offload": FILES, "accumulation": 2}),
    ("small", {"offload": Offload(activations="cpu"), **FULL}),
    ("small", {"offload": Offload(activations="cpu"), "pp": 2, "accumulation": 4, **FULL}),
    ("small", {"offload": Offload(activations="cpu"), "pp": 2, "accumulation": 4, **FULL, **FIRST}),
    ("small", {"optimizer_kernel": "foreach", "prefetch_bytes": 0, "bucket_bytes": 0}),
    ("small", {"optimizer_kernel": "loop", "reduces_in_flight": 1}),
    ("small", {"optimizer": "sgd", "reduce_every": "micro_batch", "accumulation": 2}),
]


def name_of(cell):
    model, settings = cell
    return " ".join([model, *(f"{key}={value}" for key, value in settings.items())])


def figures_of(cell):
    """Plan a cell; return its figures but for those that are 0."""
    name, settings = cell
    shape = SHAPES[name] if name in SHAPES else find_preset(name).shape
    candidate = Candidate(**{"num_shards": 8, **settings})
    model, ranks = ShapedModel(name, shape, 1024), candidate.world_size
    facts = plan_facts(plan(model, make_cluster("h100", ranks, gcd(ranks, 8)), candidate))
    memory, time = facts["memory"], facts["time"]
    return {
        "num_params": facts["num_params"],
        "peaks": {peak["phase"]: peak["total_bytes"] for peak in memory["peaks"]},
        "peak": above_0(memory["peak"]["lines_bytes"]),
        "high": memory["high_bytes"],
        "resting": above_0(memory["resting_bytes"]),
        "host": above_0(memory["host_lines_bytes"]),
        "files": above_0(memory["nvme_lines_bytes"]),
        "step_s": time["step_s"],
        "flops": time["num_flops_per_step"],
        **{name: above_0(figures) for name, figures in facts["traffic"].items()},
    }


def above_0(figures):
    return {name: figure for name, figure in figures.items() if figure}


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_plan_has_the_figures_that_it_had(cell):
    frozen = json.loads(FIGURES.read_text())[name_of(cell)]
    figures = figures_of(cell)
    assert figures.pop("step_s") == pytest.approx(frozen.pop("step_s"), rel=1e-12)
    assert figures == frozen


if __name__ == "__main__":
    lines = (f"{json.dumps(name_of(c))}: {json.dumps(figures_of(c))}" for c in CELLS)
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
