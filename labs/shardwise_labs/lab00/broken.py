"""Your data parallelism with a step that costs more than it must. Find the wrong line.

`shardwise lab run 0 lab00_broken.py` puts it beside the stages of ZeRO.
"""

import lab00_replicas as yours

__all__ = ["passes"]
passes = yours.passes


class Replicas(yours.Replicas):
    def step(self) -> None:
        yours.average_each(self.parameters)
        self.optimizer.step()
        self.optimizer.zero_grad()
