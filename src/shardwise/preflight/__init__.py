"""Checks of machines, network and folder before a run: `shardwise doctor --preflight`."""
