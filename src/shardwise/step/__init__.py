"""Optimizer steps: in the background, on the device, with state in files."""
