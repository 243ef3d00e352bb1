"""Measures what this machine does, with all its ranks at work at once: `shardwise bench`."""
