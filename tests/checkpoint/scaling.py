"""Runs of any number of ranks without ranks: their manifest, and the files of some of them."""

from math import prod

from shardwise.checkpoint.manifest import (
    MANIFEST,
    LayoutRow,
    Manifest,
    OptimizerRow,
    TensorRow,
    seal,
)
from shardwise.checkpoint.write import Part, index_row, write_rank


def llama_shapes(num_layers=111, width=4096, hidden=11008):
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
    root = {
        "model.embed_tokens.weight": (8 * width, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (8 * width, width),
    }
    return [root, *layers]


def manifest_of(units, num_ranks, layout, num_replicas=1):
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
        layouts=tuple(LayoutRow(kind=layout, shapes=tuple(u.values())) for u in units),
        tensors=(*rows, *steps),
        tied={},
        optimizer=OptimizerRow(class_name="AdamW", groups=[group], state={}),
        ranks=(),
    )


def part_of(rank):
    """Return what a rank writes: bytes that tell where they belong."""

    def read(number, box):
        return memoryview(expected_bytes(number, box.lo, box.hi))

    return Part(rank=rank, read=read, own=(), values={})


def expected_bytes(number, lo, hi):
    """Return the bytes of four-byte elements [lo, hi) of a tensor."""
    first = number * 2_654_435_761
    return b"".join(((first + n) % 2**32).to_bytes(4, "little") for n in range(lo, hi))


def write_all(files, folder, manifest):
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


def wanted_by(manifest, rank, num_ranks):
    """Yield (number, info, lo, hi) that a rank of another flat cut wants of each cut tensor."""
    for number, row in enumerate(manifest.tensors):
        numel = prod(row.shape)
        if row.layout is None:
            yield number, row.info, 0, numel
        else:
            yield number, row.info, numel * rank // num_ranks, numel * (rank + 1) // num_ranks
