"""Train under Ray: its workers are the ranks, and a worker that dies costs a restart, not the run.

    python examples/ray_train.py --folder /shared/runs/ray --die-after 7

Ray starts all workers again when one is lost; they go on from the newest copy in memory, or from
disk. The losses have the bits of a run without ``--die-after``. Needs `pip install "ray[train]"`.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import shardwise

STEPS, WIDTH = 10, 32


def train(asked: dict[str, Any]) -> None:
    """Train as one rank: Ray has opened the process group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    shardwise.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = Path(asked["folder"])
    with shardwise.Checkpoints(folder / "checkpoints", model, optimizer, memory_every=2) as kept:
        loaded = kept.load()
        for step in range((loaded.step or 0) + 1 if loaded else 1, STEPS + 1):
            draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            x = torch.randn(16, WIDTH, generator=draw)
            loss = F.mse_loss(model(x), x.flip(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.copy_to_memory(step)  # every second step
            if dist.get_rank() == 0:
                value = float(loss.detach())
                with (folder / "losses.txt").open("a") as file:
                    file.write(f"step {step}: loss {value:.4f} {value.hex()}\n")
            if step == asked["die_after"] and loaded is None and dist.get_rank() == 0:
                kept.finish()
                os.kill(os.getpid(), signal.SIGKILL)
        kept.save(STEPS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"))
    parser.add_argument("--die-after", type=int)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(asked.folder.resolve()), "die_after": asked.die_after},
        scaling_config=ScalingConfig(num_workers=2),  # on GPUs also use_gpu=True
        torch_config=TorchConfig(backend="gloo"),  # on GPUs leave it out: NCCL
        run_config=RunConfig(
            storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()
    print((asked.folder / "losses.txt").read_text(), end="")
