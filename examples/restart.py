"""Go on by itself when ranks die: copies of the state in memory, checkpoints on disk.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \\
        --max-restarts 3 examples/restart.py --folder runs/restart --die-after 7 13

The first rank kills itself after step 7, and after the restart again after step 13. The losses have
the bits of a run without ``--die-after``. In your own loop the ten lines of `train` are enough.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise

STEPS, WIDTH = 20, 32


def train(folder: str, die_after: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))
    shardwise.shard(model, stage=3)
    torch.manual_seed(dist.get_rank())  # of dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with shardwise.Checkpoints(folder, model, optimizer, memory_every=2) as checkpoints:
        loaded = checkpoints.load()  # from memory or from disk, whichever is newer
        done = (loaded.step or 0) if loaded else 0
        where = "memory" if loaded and loaded.from_memory else "disk"
        say(f"from step {done + 1}, loaded from {where}" if loaded else "from step 1")
        for step in range(done + 1, STEPS + 1):
            x, y = batch_of(step)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                checkpoints.save(step)
            else:
                checkpoints.copy_to_memory(step)  # every second step
            say(f"step {step}: loss {loss.item():.4f} {float(loss).hex()}")
            if step == die_after:
                checkpoints.finish()  # steps as short as these outrun what is saved behind them
                if dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return a rank's batch: a function of the step, so that no step is lost or taken twice."""
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, WIDTH, generator=draw)
    return x, x.flip(1)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/restart")
    parser.add_argument("--die-after", type=int, nargs="*", default=[], help="one step per attempt")
    asked = parser.parse_args()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    dist.init_process_group("gloo")
    train(asked.folder, (asked.die_after[attempt:] or [None])[0])
    dist.destroy_process_group()
