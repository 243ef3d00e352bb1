"""A DeepSpeed JSON, read for `shard()` and `shardwise train`, and written from ours.

Reading order: ``report`` (what became of each key), ``reading`` (values checked, keys counted),
``batch``, ``precisions``, ``zero``, ``optimizers``, ``schedules``, ``others`` (one part of the file
each), ``stepper`` (a curve as a scheduler of torch; loads torch), ``settings`` (the whole),
``train_keys`` (in the keys of `shardwise train`), ``writing`` (the way back).
"""
