"""Train two replicas that step apart, and synchronise them every ten steps (DiLoCo).

    torchrun --nproc-per-node 2 examples/local_steps.py --every 10

Three lines differ from the plain loop: `shard` gets a mesh with replicas, `LocalSteps` is made, and
its `step` is called after the optimizer's.
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.device import local_device
from shardwise.parallel import LocalSteps, Outer

STEPS, VOCAB, WIDTH = 60, 64, 64


def sent_between_replicas(model: nn.Module) -> int:
    sent = shardwise.debug.stats(model).sent_bytes
    return sum(num_bytes for kind, num_bytes in sent.items() if kind.startswith("replicate."))


def train(every: int, device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
    model = nn.Sequential(*layers, nn.Linear(4 * WIDTH, VOCAB)).to(device)
    shardwise.shard(model, mesh=shardwise.Axes(dp_replicate=2))  # in place
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = LocalSteps(model, every=every, outer=Outer(lr=0.7, momentum=0.9))
    data = torch.Generator().manual_seed(rank)  # each replica has its own data
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCAB, (8, 16), generator=data).to(device)
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
        if rank == 0 and (step == 1 or step % 20 == 0):
            sent = sent_between_replicas(model)
            print(f"step {step:3d}  loss {loss:.2f}  sent to the other replica {sent:9,} bytes")
    local.synchronize()  # one model again, for an export or an evaluation
    if rank == 0:
        numel = sum(param.numel() for param in model.parameters())
        print(f"synchronous steps would have sent {4 * numel * STEPS:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas that step separately.")
    parser.add_argument("--every", type=int, default=10, help="steps between synchronisations")
    every = parser.parse_args().every
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(every, device)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
