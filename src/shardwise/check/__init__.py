"""Checks of a sharded model: against one process, and between ranks."""
