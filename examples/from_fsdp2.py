"""A training loop of torch's FSDP2, with one import changed.

    torchrun --nproc-per-node 2 examples/from_fsdp2.py
    torchrun --nproc-per-node 2 examples/from_fsdp2.py --torch    # the same by torch's FSDP2

Both print the same losses.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise import fully_shard
from shardwise.device import local_device

STEPS, VOCAB, WIDTH = 20, 64, 64


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="use torch's fully_shard")
    shard = torch.distributed.fsdp.fully_shard if parser.parse_args().torch else fully_shard
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = build_model().to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in list(model.children())[1:-1]:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own data
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCAB, (8, 16), generator=data).to(device)
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3d}  loss {loss.item():.2f}")
    weight = model.get_parameter("1.0.weight")
    assert isinstance(weight, DTensor)  # as with FSDP2
    if dist.get_rank() == 0:
        print(f"{tuple(weight.to_local().shape)} of {tuple(weight.shape)} on this rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
