"""A DeepSpeed JSON, read for `shard()`, `shardwise train` and a plan, and written from ours.

Reading order: ``report`` (what became of each key), ``reading`` (values checked, keys counted),
``precisions``, ``blocks``, ``optimizers``, ``schedules`` (one part of the file each), ``stepper``
(a curve as a scheduler of torch; loads torch), ``settings`` (the whole), ``train_keys`` (in the
keys of `shardwise train`), ``writing`` (the way back).
"""
