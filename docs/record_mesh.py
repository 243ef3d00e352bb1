"""Record the groups of ranks that `Axes` makes, for each choice of degrees of 16 ranks.

Run `python docs/record_mesh.py`; then `make pages` writes the page on the mesh from what was
recorded. Groups are those of the meshes that each rank asks for; nothing is sent.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.axes import Axes

RECORDED = Path(__file__).parent / "site" / "data" / "mesh.json"
RANKS, SIZES = 16, (1, 2, 4, 8, 16)
# What an axis divides, and what its ranks send each other.
AXES = {
    "pp": ("layers", "activations of each micro-batch to the next stage, gradients back"),
    "dp_replicate": ("the batch", "slices of gradients, to be added"),
    "dp_shard": ("the batch", "what fsdp sends"),
    "cp": ("each sequence", "keys and values in each attention layer"),
    "tp": ("each layer's matrices", "activations in each layer, forward and backward"),
    "fsdp": ("parameters, gradients, optimizer state", "parameters by unit; gradients"),
    "loss": ("tokens", "sums of the loss"),
    "ep": ("experts", "tokens to their experts and back"),
    "efsdp": ("each expert's parameters", "experts' parameters and gradients"),
}
EXPERTS = ("ep", "efsdp")
DENSE = tuple(name for name in AXES if name not in EXPERTS)


def choices() -> Iterator[tuple[int, int, int, int, int]]:
    """Yield degrees of pp, dp_replicate, cp, tp and ep; dp_shard takes the remaining ranks."""
    for pp, replicate, cp, tp in product(SIZES, repeat=4):
        shards, left = divmod(RANKS, pp * replicate * cp * tp)
        if shards and not left:
            yield from ((pp, replicate, cp, tp, ep) for ep in SIZES if ep <= shards * cp * tp)


def groups(degrees: tuple[int, int, int, int, int], names: tuple[str, ...]) -> dict[str, str]:
    """Return the number of each rank's group, as a digit, by axis; groups are in order of ranks."""
    pp, replicate, cp, tp, ep = degrees
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        axes = Axes(dp_replicate=replicate, cp=cp, tp=tp, pp=pp, ep=ep, device_type="cpu")
        for name in names:
            found[name].append(tuple(axes[name].mesh.flatten().tolist()))
        dist.destroy_process_group()
    return {
        name: "".join(f"{sorted(set(of_ranks)).index(each):x}" for each in of_ranks)
        for name, of_ranks in found.items()
    }


def parts(degrees: tuple[int, int, int, int, int]) -> str:
    """Return the part of the batch of each rank, as a digit."""
    pp, replicate, cp, tp, _ = degrees
    axes = Axes(dp_replicate=replicate, cp=cp, tp=tp, pp=pp).over(RANKS)
    return "".join(f"{axes.part_of_batch(rank)[0]:x}" for rank in range(RANKS))


def main() -> None:
    dense, experts = {}, {}
    for degrees in choices():
        key = "/".join(map(str, degrees))
        experts[key] = groups(degrees, EXPERTS)
        if degrees[-1] == 1:
            dense[key.removesuffix("/1")] = groups(degrees, DENSE) | {"part": parts(degrees)}
    found = {"axes": AXES, "dense": dense, "experts": experts}
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main()
