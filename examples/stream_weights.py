"""Train on some ranks and generate on another, which gets the new weights every few steps.

    torchrun --nproc-per-node 3 examples/stream_weights.py

All ranks but the last train a sharded model; the last holds a plain one and generates with it. A
generator that is another program takes the weights in the same way, over its connection to rank 0.
"""

import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from train_loop import VOCAB, NextToken

ROUNDS, STEPS = 4, 3  # how often weights are sent, and the steps before each time


def train(mesh: DeviceMesh, generator: int) -> None:
    model = shardwise.shard(NextToken(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            tokens = torch.randint(VOCAB, (16, 16), generator=data)
            target = (7 * tokens + 3).flatten() % VOCAB  # the function to learn
            F.cross_entropy(model(tokens).flatten(0, 1), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        # Every rank calls it; the loop has turns on rank 0 only.
        for name, weight in shardwise.interop.stream(model, ranks=[0]):
            dist.send_object_list([name, weight.shape, weight.dtype], generator)
            dist.send(weight, generator)
        if dist.get_rank() == 0:
            dist.send_object_list([None, None, None], generator)


def received() -> Iterator[tuple[str, Tensor]]:
    while True:
        dist.recv_object_list(about := [None] * 3, 0)
        name, shape, dtype = about
        if name is None:
            return
        dist.recv(weight := torch.empty(shape, dtype=dtype), 0)
        yield name, weight


@torch.no_grad()
def generate() -> None:
    model = NextToken()
    for number in range(1, ROUNDS + 1):
        for name, weight in received():
            model.get_parameter(name).copy_(weight)
        token, right = torch.tensor([[5]]), 0
        for _ in range(32):
            following = model(token)[:, -1:].argmax(-1)
            right += int(following) == (7 * int(token) + 3) % VOCAB
            token = following
        print(f"after {number * STEPS} steps: {right} of 32 generated tokens are right", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = dist.get_world_size() - 1
    mesh = DeviceMesh("cpu", list(range(generator)))  # every rank makes it
    generate() if dist.get_rank() == generator else train(mesh, generator)
    dist.barrier()
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
