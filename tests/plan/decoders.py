"""Small decoders by their shapes, and plans of them on small clusters."""

from dataclasses import replace
from math import gcd

from hypothesis import strategies as st

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import llama_shape
from shardwise.plan.model.tape import UnitWork
from shardwise.plan.planning import plan

SEQ = 64
SHAPE = llama_shape(3, 64, 4, 2, 160, 320)


def make_model(shape=SHAPE, name="small"):
    return ShapedModel(name, shape, SEQ)


def flops_of(tape):
    return sum(c.flops for e in tape.events if isinstance(e, UnitWork) for c in e.costs)


def num_params_of(tape):
    return sum(unit.numel for unit in tape.units)


def cluster_of_ranks(num_ranks):
    return make_cluster("h100", num_ranks, gcd(num_ranks, 8))


def make_plan(shape=SHAPE, cluster=None, **settings):
    candidate = Candidate(**settings)
    return plan(make_model(shape), cluster or cluster_of_ranks(candidate.world_size), candidate)


def faster(cluster, links=1.0, device=1.0):
    """Return the cluster with links and devices so many times as fast."""
    node = cluster.node
    chip = node.accelerator
    return replace(
        cluster,
        node=replace(
            node,
            intra=node.intra.scaled(links),
            inter=node.inter.scaled(links),
            accelerator=replace(
                chip,
                peak={k: v * device for k, v in chip.peak.items()},
                matmul={k: v * device for k, v in chip.matmul.items()},
                memory_bytes_per_s=chip.memory_bytes_per_s * device,
            ),
        ),
    )


@st.composite
def shapes(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.integers(1, 3))
    return llama_shape(
        draw(st.integers(1, 4)),
        heads * draw(st.sampled_from([8, 16, 50])),
        heads,
        kv_heads,
        draw(st.integers(8, 300)),
        draw(st.integers(2, 500)),
        tied=draw(st.booleans()),
    )


@st.composite
def settings_of_engine(draw):
    """Draw what a candidate of the engine may have; the stage, shards and batch are left out."""
    return {
        "num_replicas": draw(st.sampled_from([1, 1, 2])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "layout": draw(st.sampled_from(["rows", "flat"])),
        "reduce_every": draw(st.sampled_from([None, "step", "micro_batch"])),
        "prefetch_bytes": draw(st.sampled_from([None, 0, 1 << 16, 1 << 30])),
        "bucket_bytes": draw(st.sampled_from([0, 1 << 14, 1 << 20])),
        "activation_checkpointing": draw(st.sampled_from(["none", "full"])),
    }


def flops_per_token(shape, seq, *, causal=False, recomputed=False):
    """Model FLOPs per token of forward and backward; ``recomputed``: one forward of all layers."""
    layer = sum(shape.layer_flops_per_token(seq, causal=causal)) * shape.layers
    return layer * (4 if recomputed else 3) + 3 * shape.head_flops_per_token
