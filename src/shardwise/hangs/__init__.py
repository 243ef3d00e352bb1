"""Hangs and deaths of ranks: heartbeats, diagnosis, and an end to waits that cannot end."""
