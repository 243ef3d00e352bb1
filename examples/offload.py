"""Train on one device with parameters, gradients and optimizer state in host memory.

    torchrun --nproc-per-node 1 examples/offload.py
    torchrun --nproc-per-node 1 examples/offload.py --place nvme:/tmp    # optimizer state in files

The only argument that differs from training in the device's memory is `offload`. The losses are the
same; on a machine without a GPU they have the same bits.
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.device import local_device

STEPS, VOCAB, WIDTH = 20, 64, 128


def build_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def train(device: torch.device, place: str | None) -> list[float]:
    model = shardwise.shard(build_model().to(device), stage=3, offload=place, units="Sequential")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    data, losses = torch.Generator().manual_seed(0), list[float]()
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (8, 16), generator=data).to(device)
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # unit by unit, behind the next forward pass
        optimizer.zero_grad()
        losses.append(loss.item())
    bytes_of = shardwise.debug.stats(model, optimizer).bytes_by_place
    print(f"offload={place}: loss {losses[0]:.2f} to {losses[-1]:.2f};", end=" ")
    print(", ".join(f"{held:,} bytes {where}" for where, held in bytes_of.items()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", default="cpu", help="cpu, or nvme: and a folder")
    place = parser.parse_args().place
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    in_memory, offloaded = train(device, None), train(device, place)
    print("the same losses:", in_memory == offloaded)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
