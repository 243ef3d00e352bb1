"""The recipe behind `shardwise train`."""
