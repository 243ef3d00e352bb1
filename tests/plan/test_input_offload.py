"""Inputs of checkpointed blocks on the host, planned: bytes as of a run, the way, the search."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shardwise import Offload as OffDeviceBytes
from shardwise import shard
from shardwise.debug import stats
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.model.presets import find_model
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.tracing import trace
from shardwise.plan.planning import plan
from shardwise.plan.searching import Limits, Space, search
from shardwise.plan.sizes import PRECISIONS
from shardwise.plan.step.play import play
from shardwise.plan.step.program import LinkTransfer
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder

BLOCKS, DIM, SEQ, VOCAB, ROWS = 5, 32, 16, 64, 2
HOST = Offload(activations="cpu")


def decoder():
    sizes = {"dim": DIM, "layers": BLOCKS, "heads": 2, "seq": SEQ, "vocab": VOCAB}
    return Decoder(TrainConfig(data="-", activation_checkpointing=True, **sizes), VOCAB)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": DIM, "intermediate_size": 48, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": BLOCKS}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    name = "activation_checkpointing_enable"  # and of transformers 4 the other
    getattr(made, name, made.gradient_checkpointing_enable)({"use_reentrant": False})
    return made.train()


def batch():
    return torch.zeros(ROWS, SEQ, dtype=torch.long)


def loss_of(model, tokens):
    found = model(tokens)
    logits = getattr(found, "logits", found)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def candidate_of(precision, units, offload):
    return Candidate(
        precision=precision,
        micro_batch=ROWS,
        units=units,
        activation_checkpointing="full",
        offload=offload,
        transport="point_to_point",
    )


def tape_of(make, precision, units):
    return trace(
        make(),
        batch,
        loss_of,
        name="model",
        compute_dtype=PRECISIONS[precision].compute,
        units=units,
    )


def host_bytes_of_a_run(rank, world_size, make, precision, units):
    model = shard(
        make(), precision=precision, units=units, offload=OffDeviceBytes(activations="cpu")
    )
    for _ in range(2):
        loss_of(model, batch()).backward()
    return stats(model).bytes_by_place["host"]


@pytest.mark.parametrize(
    ("make", "precision", "units"),
    [
        (decoder, "fp32", None),
        (decoder, "bf16", ("Attention", "FeedForward")),
        (llama, "bf16", None),
    ],
)
def test_planned_host_bytes_are_those_of_a_run(make, precision, units):
    if make is llama:
        pytest.importorskip("transformers")
    tape = tape_of(make, precision, units)
    planned = play(tape, candidate_of(precision, units, HOST)).host.total
    size = 2 if precision == "bf16" else 4
    assert planned == (BLOCKS - 1) * ROWS * SEQ * DIM * size
    assert run_ranks(host_bytes_of_a_run, 1, make, precision, units) == [planned]


def transfers(played):
    return [
        (op.work.link, op.work.num_bytes, op.unit)
        for op in played.program.ops
        if isinstance(op.work, LinkTransfer)
    ]


def test_each_input_but_the_last_goes_and_comes_once_and_the_device_has_two():
    tape = tape_of(decoder, "fp32", None)
    each = ROWS * SEQ * DIM * 4
    plain, away = (
        play(tape, replace(candidate_of("fp32", None, offload), accumulation=2))
        for offload in (Offload(), HOST)
    )
    out = [("to_host", each, unit) for unit in range(1, BLOCKS)]
    back = [("to_device", each, unit) for unit in range(BLOCKS - 1, 0, -1)]
    assert transfers(plain) == [] and transfers(away) == 2 * (out + back)
    assert away.device == plain.device
    at_loss = [
        next(m.ledger.total for m in played.peaks if m.phase == "loss") for played in (plain, away)
    ]
    assert at_loss[0] - at_loss[1] == (BLOCKS - 1) * each  # the last block's stays
    forward = [
        next(m.ledger.total for m in played.peaks if m.phase == "forward")
        for played in (plain, away)
    ]
    assert (BLOCKS - 3) * each <= forward[0] - forward[1] <= (BLOCKS - 1) * each


def test_a_search_moves_inputs_only_where_nothing_fits_without():
    source = find_model("llama-3.2-1b")
    assert source.shape is not None
    model = ShapedModel(source.name, source.shape, 4096)
    cluster = make_cluster("h100-sxm", 8)
    base = Candidate(num_shards=8, activation_checkpointing="full")
    space = Space(
        base,
        stages=(3,),
        activation_checkpointing=("none", "full"),
        prefetch_units=(1,),
        micro_batches=(1, 4, 16),
        may_move_inputs=True,
    )
    whole = replace(space, activation_checkpointing=("full",))
    largest = plan(model, cluster, replace(base, micro_batch=4)).memory.high_bytes
    limits = Limits(max_memory_bytes=largest - 1)
    found = search(model, cluster, whole, limits)
    met = [p.candidate for p in found.pareto] + [r.candidate for r in found.rejected]
    moved = [c for c in met if c.offload.activations == "cpu"]
    without = [replace(c, offload=Offload()) for c in moved]
    lost = {r.candidate: r.reason for r in found.rejected}
    assert all(c.activation_checkpointing == "full" for c in moved)
    assert all("needs up to" in lost[c] for c in without)
    wide = search(model, cluster, space, Limits(max_memory_bytes=1 << 50))
    capacity = min(cluster.node.accelerator.memory_bytes, 1 << 50)
    for each in wide.pareto:
        fits = plan(model, cluster, replace(each.candidate, offload=Offload()))
        is_moved = each.candidate.offload.activations == "cpu"
        assert is_moved == (fits.memory.high_bytes > capacity)
    never = search(model, cluster, replace(whole, may_move_inputs=False), limits)
    assert not [p for p in never.pareto if p.candidate.offload.activations == "cpu"]
    best = found.winner
    assert best is not None and never.winner is not None
    assert best.tokens_per_s >= never.winner.tokens_per_s
    assert moved
