"""Gathers and reductions of fewer bytes: codes of 8 or 4 bits with a scale per block."""
