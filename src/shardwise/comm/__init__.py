"""Collectives on flat tensors; the only caller of torch.distributed's collectives."""
