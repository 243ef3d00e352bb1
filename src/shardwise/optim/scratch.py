"""Memory that the spans of one step use again and again, so that it stays in a cache."""

import torch


class Scratch:
    """Buffers by name: asked for again, one is the same memory, whatever was in it."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory, shape [numel]."""
        key = name, dtype, device
        if key not in self._held or self._held[key].numel() < numel:
            self._held[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._held[key][:numel]

    def converted(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return flat values in a dtype: a copy in memory of this name, unless they have it."""
        if values.dtype == dtype:
            return values
        return self.take(name, values.numel(), dtype, values.device).copy_(values)
