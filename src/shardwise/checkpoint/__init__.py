"""Checkpoints that survive kills, power cuts, full disks and flipped bits."""
