"""The measurements of this machine with all its ranks at once, for `shardwise bench`."""
