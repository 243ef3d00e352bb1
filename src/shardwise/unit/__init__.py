"""One unit: its ShardTensors, its storage, how it is filled, unsharded and reduced."""
