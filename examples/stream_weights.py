"""Train on some ranks and generate on another, which gets the new weights every few steps.

    python examples/stream_weights.py --ranks 2
    torchrun --nproc-per-node 3 examples/stream_weights.py

All ranks but the last train a sharded model; the last holds a plain one and generates with it. A
generator that is another program takes the weights in the same way, over its connection to rank 0.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists: its defaults would keep it
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
            logits = model(tokens)
            F.cross_entropy(logits.flatten(0, 1), (7 * tokens + 3).flatten() % VOCAB).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, weight in shardwise.interop.stream(
            model, ranks=[0]
        ):  # every rank; turns on rank 0 only
            dist.send_object_list([name, weight.shape, weight.dtype], generator)
            dist.send(weight, generator)
        if dist.get_rank() == 0:
            dist.send_object_list([None, None, None], generator)


def received() -> Iterator[tuple[str, Tensor]]:
    while True:
        about = [None, None, None]
        dist.recv_object_list(about, 0)
        name, shape, dtype = about
        if name is None:
            return
        weight = torch.empty(shape, dtype=dtype)
        dist.recv(weight, 0)
        yield name, weight


@torch.no_grad()
def generate() -> None:
    model = NextToken()
    places = model.state_dict()
    for number in range(1, ROUNDS + 1):
        for name, weight in received():
            places[name].copy_(weight)
        token, right = torch.tensor([[5]]), 0
        for _ in range(32):
            following = model(token)[:, -1:].argmax(-1)
            right += int(following) == (7 * int(token) + 3) % VOCAB
            token = following
        print(f"after {number * STEPS} steps: {right} of 32 generated tokens are right", flush=True)


def run_rank(local_rank: int, num_ranks: int = -1, method: str | None = None) -> None:
    rank = local_rank if method else -1  # torchrun says by itself which rank this is
    dist.init_process_group("gloo", method, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    generator = dist.get_world_size() - 1
    mesh = DeviceMesh("cpu", list(range(generator)))  # every rank makes it
    if dist.get_rank() == generator:
        generate()
    else:
        train(mesh, generator)
    dist.barrier()
    gc.collect()  # hooks form cycles that hold the group
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights from training ranks to a generator.")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (not by torchrun)")
    asked = parser.parse_args()
    if dist.is_torchelastic_launched():
        return run_rank(dist.get_node_local_rank())
    with tempfile.TemporaryDirectory() as folder:
        arguments = (asked.ranks, f"file://{folder}/group")
        torch.multiprocessing.spawn(run_rank, arguments, asked.ranks)


if __name__ == "__main__":
    main()
