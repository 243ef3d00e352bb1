"""Hangs and deaths of ranks.

Reading order: ``heartbeat`` (the state of each rank in the store), ``waits`` (those of this
process), ``diagnosis`` (which ranks keep a wait from ending), ``watch`` (the thread that looks).
The package attaches the watch to `comm.listener`.
"""
