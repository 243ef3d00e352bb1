"""Collectives on flat tensors; the only caller of torch.distributed's collectives.

Reading order: ``pending`` (values), ``point_to_point`` and ``coalesced`` (two transports with one
interface), ``control`` (small exchanges on a group of their own), ``collectives`` (which transport,
and the few that both share).
"""
