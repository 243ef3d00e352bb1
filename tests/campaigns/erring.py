"""Shardwise's command, whose optimizer errs in one bit when a file asks for it; see `elastic`.

    ERRS=FILE python tests/campaigns/erring.py train ...

After a step, if FILE exists, the lowest bit of the first element of this rank's state flips, and
FILE is gone.
"""

import os
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.cli.main import main
from shardwise.layout.placements import local_of

ASKED = Path(os.environ["ERRS"])


@torch.no_grad()
def err(optimizer, *_):
    """Flip the bit if it is asked for."""
    if ASKED.exists():
        ASKED.unlink()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        values = next(local for param in params if (local := local_of(param)).numel())
        values.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


if __name__ == "__main__":
    register_optimizer_step_post_hook(err)
    main()
