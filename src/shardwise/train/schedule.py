"""Learning rate of a step, in closed form: linear warm-up, then constant, linear or cosine.

Or a curve of DeepSpeed, for runs that come from there.
"""

import math

from shardwise.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step; the first one is 1.

    The warm-up rises in `warmup_steps` equal parts and reaches `lr` on its last step; the decay
    reaches `min_lr` on the last step of the run. A curve of DeepSpeed has its own options.
    """
    if config.curve is not None:
        return config.curve.learning_rate(step - 1, config.lr)
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    remaining = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining
