"""Collectives on flat tensors; the only caller of torch.distributed's collectives.

Reading order: ``collective_key`` and ``pending`` (values), ``point_to_point`` and ``coalesced``
(two transports with one interface), ``control`` (small exchanges on a separate group),
``collectives`` (which transport, and the few that both share).
"""
