"""Runs of any number of ranks without ranks: their manifest, and the files of some of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from inner import (
    MANIFEST,
    Files,
    LayoutRow,
    Manifest,
    OptimizerRow,
    Part,
    TensorRow,
    index_row,
    seal,
    write_rank,
)
from shardwise.layout.boxes import Box

Shapes = dict[str, tuple[int, ...]]


def llama_shapes(num_layers: int = 111, width: int = 4096, hidden: int = 11008) -> list[Shapes]:
    """Return the parameters of a Llama by unit: nine in each layer, three around them."""
    layers = [
        {
            f"model.layers.{n}.self_attn.q_proj.weight": (width, width),
            f"model.layers.{n}.self_attn.k_proj.weight": (width // 4, width),
            f"model.layers.{n}.self_attn.v_proj.weight": (width // 4, width),
            f"model.layers.{n}.self_attn.o_proj.weight": (width, width),
            f"model.layers.{n}.mlp.gate_proj.weight": (hidden, width),
            f"model.layers.{n}.mlp.up_proj.weight": (hidden, width),
            f"model.layers.{n}.mlp.down_proj.weight": (width, hidden),
            f"model.layers.{n}.input_layernorm.weight": (width,),
            f"model.layers.{n}.post_attention_layernorm.weight": (width,),
        }
        for n in range(num_layers)
    ]
    root: Shapes = {
        "model.embed_tokens.weight": (8 * width, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (8 * width, width),
    }
    return [root, *layers]


def manifest_of(
    units: list[Shapes], num_ranks: int, layout: str, num_replicas: int = 1
) -> Manifest:
    """Describe a run with Adam: for each parameter two moments and a step count."""
    rows, steps = [], []
    for number, unit in enumerate(units):
        for index, (name, shape) in enumerate(unit.items()):
            cut = {"dtype": "F32", "shape": shape, "layout": number, "index": index}
            rows.append(TensorRow(kind="param", name=name, **cut))
            rows += [
                TensorRow(kind="optimizer", name=name, state=state, **cut)
                for state in ("exp_avg", "exp_avg_sq")
            ]
            plain = {"dtype": "F32", "shape": (), "rank": 0}
            steps.append(TensorRow(kind="optimizer", name=name, state="step", **plain))
    names = [name for unit in units for name in unit]
    group = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": names}
    return Manifest(
        format=1,
        shardwise="0",
        torch="0",
        run="0" * 16,
        step=7,
        saved_at="",
        stage=3,
        num_shards=num_ranks // num_replicas,
        num_replicas=num_replicas,
        layouts=tuple(LayoutRow(kind=layout, shapes=tuple(u.values())) for u in units),  # type: ignore[arg-type]
        tensors=(*rows, *steps),
        tied={},
        optimizer=OptimizerRow(class_name="AdamW", groups=[group], state={}),
        ranks=(),
    )


def part_of(rank: int) -> Part:
    """Return what a rank writes: bytes that tell where they belong."""

    def read(number: int, box: Box) -> memoryview:
        return memoryview(expected_bytes(number, box.lo, box.hi))

    return Part(rank=rank, read=read, own=(), values={})


def expected_bytes(number: int, lo: int, hi: int) -> bytes:
    """Return the bytes of four-byte elements [lo, hi) of a tensor."""
    first = number * 2_654_435_761
    return b"".join(((first + n) % 2**32).to_bytes(4, "little") for n in range(lo, hi))


def write_all(files: Files, folder: Path, manifest: Manifest) -> Manifest:
    """Write every rank's files and the manifest; return it."""
    files.make_folders(folder)
    rows = [
        index_row(write_rank(files, folder, manifest, part_of(rank)))
        for rank in range(manifest.num_ranks)
    ]
    whole = manifest.model_copy(update={"ranks": tuple(rows)})
    with files.create(folder / MANIFEST) as writer:
        writer.write([memoryview(seal(whole))])
    return whole


def wanted_by(manifest: Manifest, rank: int, num_ranks: int) -> Iterator[tuple[int, Any, int, int]]:
    """Yield (number, info, lo, hi) that a rank of another flat cut wants of each cut tensor."""
    for number, row in enumerate(manifest.tensors):
        numel = prod(row.shape)
        if row.layout is None:
            yield number, row.info, 0, numel
        else:
            yield number, row.info, numel * rank // num_ranks, numel * (rank + 1) // num_ranks
