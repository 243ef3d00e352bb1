"""A DeepSpeed JSON, read for `shard()`, `shardwise train` and a plan, and written from ours."""
