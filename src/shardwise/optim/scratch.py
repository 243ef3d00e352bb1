"""Memory that all spans of one step reuse, so that it stays in a cache."""

import torch


class Scratch:
    """Buffers by name: a second request returns the same memory, with its old contents."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory, shape [numel]."""
        key = name, dtype, device
        if key not in self._held or self._held[key].numel() < numel:
            self._held[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._held[key][:numel]

    def converted(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return flat values in a dtype, copied to memory of this name if they have another."""
        if values.dtype == dtype:
            return values
        return self.take(name, values.numel(), dtype, values.device).copy_(values)
