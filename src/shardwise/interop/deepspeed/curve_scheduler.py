"""A curve as a scheduler of torch. It needs torch, which reading a file does not."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.train.curves import Curve


class CurveScheduler(LRScheduler):
    """Set each group's learning rate, and for one cycle its momenta, from a closed form.

    Call `step()` after each `optimizer.step()`, but, as in DeepSpeed, not after a step that a loss
    scaler skipped.

    **State** the number of steps taken, and the rates that the optimizer was made with.

    **Raises** ConfigError if the curve lacks an option, or an option's list has another length than
    the parameter groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve) -> None:
        curve.check_groups(len(optimizer.param_groups))
        curve.learning_rate(0, 0.0)  # raises before anything changes
        self._curve = curve
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the next update, one per group. `step()` calls it."""
        done = self.last_epoch
        return [
            self._curve.learning_rate(done, base, group)
            for group, base in enumerate(map(float, self.base_lrs))
        ]

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step."""
        super().step(epoch)
        self._set_momenta()

    def _set_momenta(self) -> None:
        if "betas" in self.optimizer.defaults:
            for number, group in enumerate(self.optimizer.param_groups):
                betas = self._curve.betas(self.last_epoch, number)
                group["betas"] = group["betas"] if betas is None else betas

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the first rates."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(lr) for lr in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, and set the rates of the next update."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = int(state_dict["last_epoch"])
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates
        self._set_momenta()
