"""Lab 12: kill a rank. Checkpoints that are whole or absent, restart, and the same losses.

Your ZeRO-1 of lab 3 is trained, killed, and started again. `shardwise lab run 12` and
`shardwise lab check 12 lab12_restart.py` start and kill real processes.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lab03_zero1 import Zero1, gather_slices, padded

# Step 1, before you run anything. A checkpoint has the fp32 values and Adam's two moments.
PREDICT = {
    "GB of a checkpoint of 7e9 parameters": 84,  # predicted
    "GB that each of 8 ranks writes": 10.5,  # predicted
    # A save every 500 steps, and a failure at any moment.
    "steps lost by a failure, on average": 250,  # predicted
    "losses that differ after a restart": 0,  # predicted
}

State = dict[str, Tensor]


def save(folder: Path, step: int, state: State) -> None:
    """Write a checkpoint of all ranks: folder/step-000004 is whole, or it is not there."""
    rank = dist.get_rank()
    whole, growing = folder / f"step-{step:06}", folder / f".tmp-{step:06}"
    # GAP 1. Each rank makes `growing` (exist_ok=True) and writes its state to rank0.pt, rank1.pt
    # ... there: `torch.save(state, file)`, then `file.flush()` and `os.fsync(file.fileno())`.
    # `dist.barrier()` returns when all ranks are in it. Then rank 0 renames the folder, and no
    # rank goes on before that.
    growing.mkdir(exist_ok=True)
    with open(growing / f"rank{rank}.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    if rank == 0:
        growing.rename(whole)
    dist.barrier()
    # END


def newest(folder: Path) -> Path | None:
    """Return the whole checkpoint of the highest step, or None."""
    # GAP 2. What a killed save has left behind is no checkpoint.
    found = sorted(folder.glob("step-*"))
    return found[-1] if found else None
    # END


def state_of(trainer: Zero1) -> State:
    """Return all that this rank's next steps depend on."""
    # GAP 3. "values" of the shard (a clone: `torch.save` writes all memory behind a view), Adam's
    # "first" and "second" moments and "count" of steps (`trainer.optimizer.state[trainer.shard]`
    # has exp_avg, exp_avg_sq and step), and "random", the generator: `torch.get_rng_state()`.
    adam = trainer.optimizer.state[trainer.shard]
    return {
        "values": trainer.shard.data.clone(),
        "first": adam["exp_avg"],
        "second": adam["exp_avg_sq"],
        "count": adam["step"],
        "random": torch.get_rng_state(),
    }
    # END


def recut(slices: list[Tensor], numel: int, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's slice now, from the slices of all ranks that saved.

    `numel` elements are real; zeros at the end made slices equal, then and now.
    """
    # GAP 4. Join, drop the old zeros, add new ones, and cut. `padded` of lab 3 tells how many.
    # Return a tensor of its own, and no view of all of them.
    flat = torch.zeros(padded(numel, num_ranks))
    flat[:numel] = torch.cat(slices)[:numel]
    return flat.chunk(num_ranks)[rank].clone()
    # END


def restore(trainer: Zero1, states: list[State], numel: int) -> None:
    """Put the states of all ranks that saved into a new trainer, on any number of ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = {
        name: recut([state[name] for state in states], numel, rank, num_ranks)
        for name in ("values", "first", "second")
    }
    # GAP 5. Fill the shard in place, set the optimizer's state of the shard, gather the full
    # values. On as many ranks as saved, also `torch.set_rng_state` of this rank's "random".
    trainer.shard.data.copy_(mine["values"])
    trainer.optimizer.state[trainer.shard] = {
        "exp_avg": mine["first"],
        "exp_avg_sq": mine["second"],
        "step": states[0]["count"],
    }
    gather_slices(trainer.flat.values, trainer.shard.data)
    if len(states) == num_ranks:
        torch.set_rng_state(states[rank]["random"])
    # END


def train(
    trainer: Zero1, folder: Path, steps: int, every: int, loss_of: Callable[[int], Tensor]
) -> None:
    """Train from the newest checkpoint on, or from the start; save every few steps."""
    first, numel = 1, trainer.numel  # the check has counted the parameters
    if (found := newest(folder)) is not None:
        count = len(list(found.glob("rank*.pt")))
        states = [torch.load(found / f"rank{rank}.pt") for rank in range(count)]
        restore(trainer, states, numel)
        first = int(found.name.removeprefix("step-")) + 1
    for step in range(first, steps + 1):
        trainer.backward(loss_of(step))
        trainer.step()
        if step % every == 0:
            save(folder, step, state_of(trainer))


# After the run. lab12_broken.py has one wrong line. Which finding names a run like that: "SW022" no
# step any more, "SW041" numbers that are not finite, "SW050" saves stop the training, "SW051" a
# failure would cost much work?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# The checkpoint of 7B on 8 ranks, each of which writes 1 GB/s; a failure comes once in 24 hours.
# Save every 2, 20, 120 or 600 minutes?
DECIDE = {
    "minutes": None,
}

# True or False?
CLAIMS = {
    "The parameters are enough to go on with the same losses": None,
    "If one rank has written its file, that part of the step can be used": None,
    "A checkpoint can be loaded on more ranks than have saved it": None,
}
