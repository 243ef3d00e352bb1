"""Ranks that look like processes of a launcher, which accelerate and Lightning want to see."""

import os
import sys
from contextlib import contextmanager


@contextmanager
def launched(rank, world_size):
    """Set what torchrun sets; put the environment back, and forget accelerate's state, after."""
    before = dict(os.environ)
    own = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size}
    own |= {"MASTER_PORT": 1, "OMP_NUM_THREADS": 1}  # the group is there already
    os.environ |= {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(True)
            GradientState._reset_state()
