"""A fill pattern that marks memory as unwritten."""

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the pattern."""
    integers, pattern = _as_integers(tensor)
    integers.fill_(pattern)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has an element with the pattern, or is on meta.

    Integers of up to two bytes and floats of one may have any value, so all must have the pattern.
    """
    if tensor.is_meta or not tensor.numel():
        return tensor.is_meta
    integers, pattern = _as_integers(tensor)
    found = integers == pattern
    is_float, size = tensor.is_floating_point(), integers.element_size()
    is_exact = tensor.dtype == torch.bool or size > (1 if is_float else 2)
    return bool(found.any() if is_exact else found.all())


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bits, and the pattern: a NaN that no operation gives, or an unlikely integer."""
    bits = tensor.detach()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    size, is_float = bits.element_size(), bits.is_floating_point()
    pattern = -1 if is_float else int.from_bytes(b"\xa7" * size, signed=True)
    return bits.view(_INTEGERS[size]), pattern
