"""accelerate's loop on a sharded model, stopped in the middle and resumed.

    pip install accelerate
    torchrun --nproc-per-node 2 examples/accelerate_loop.py
    accelerate launch --num_processes 2 examples/accelerate_loop.py

Two lines differ from plain accelerate: the import of Accelerator, and `shard`.
"""

import argparse
import gc

import torch
import torch.distributed.nn.functional  # imported after init, it keeps the group alive
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.interop.accelerate import Accelerator

VOCAB, WIDTH = 64, 64


class Block(nn.Sequential):  # each becomes a unit
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def make_model() -> nn.Module:
    blocks = (Block(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))


def run(folder: str, epochs: int, resume: bool) -> None:
    on_cpu = not torch.accelerator.is_available()  # accelerate needs it to see ranks on the CPU
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = shardwise.shard(make_model().to(accelerator.device), stage=3, units="Block")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after shard()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=64, gamma=0.5)
    tokens = torch.randint(VOCAB, (512, 16), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(epochs):
        total = torch.zeros((), device=accelerator.device)
        for (batch,) in loader:
            with accelerator.accumulate(model):
                target = (7 * batch + 3) % VOCAB  # the pattern to learn
                loss = F.cross_entropy(model(batch).flatten(0, 1), target.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total, "mean").item() / len(loader)
        accelerator.print(f"epoch {epoch}  loss {mean:.4f}  rate {schedule.get_last_lr()[0]:.1e}")
    accelerator.save_state(folder)
    accelerator.save_model(model, f"{folder}/whole")
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description="accelerate's loop on sharded parameters.")
    parser.add_argument("--folder", default="runs/accelerate", help="where the state goes")
    folder = parser.parse_args().folder
    run(folder, epochs=2, resume=False)
    run(folder, epochs=2, resume=True)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
