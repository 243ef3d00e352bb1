"""Files of tokens, mapped and cut into windows."""

import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.errors import ConfigError

_MAX_HEADER_BYTES = 1000  # one row of integers has 118
_SHOWN_CHARS = 300


class TokenFiles(Dataset[tuple[Tensor, Tensor]]):
    """Windows of token files, as a dataset of (ids, targets), each int64 [seq].

    ``files`` are `.npy` files of one row of integers, or raw files of ``dtype``, of any size: they
    are mapped, and a window is read when it is requested. A window starts at a multiple of ``seq``
    and has one token more for the targets, which are one ahead; it never spans two files.

    **Cost** a window is one read of ``seq + 1`` tokens. Workers of a DataLoader map the files anew.

    **Raises** ConfigError if a file cannot be read, is no row of integers, or has no window.
    """

    def __init__(
        self, files: Sequence[Path | str], seq: int, *, dtype: np.dtype | str | None = None
    ) -> None:
        if isinstance(files, str | Path) or not files or seq < 1:
            raise ConfigError(
                f"TokenFiles: expected a list of files, and seq above 0, got {files!r}, seq {seq}"
            )
        self.seq = seq
        self._sources = [(Path(file), dtype) for file in files]
        self._rows = [_map_row(*source) for source in self._sources]
        counts = [max(0, (len(row) - 1) // seq) for row in self._rows]
        for (path, _), count, row in zip(self._sources, counts, self._rows, strict=True):
            if not count:
                raise ConfigError(f"{path}: {len(row)} tokens are no window of seq {seq} + 1")
        self._ends = list(accumulate(counts))

    @property
    def num_tokens(self) -> int:
        """Tokens of all files."""
        return sum(map(len, self._rows))

    @property
    def rows(self) -> Sequence[np.ndarray]:
        """The mapped tokens, a row per file."""
        return self._rows

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        file = bisect_right(self._ends, window)
        first = (window - (self._ends[file - 1] if file else 0)) * self.seq
        row = self._rows[file][first : first + self.seq + 1]
        tokens = torch.from_numpy(row.astype(np.int64))
        return tokens[:-1], tokens[1:]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": None}  # workers map the files, and copy nothing

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = [_map_row(*source) for source in self._sources]


def _map_row(path: Path, dtype: np.dtype | str | None) -> np.ndarray:
    try:
        if not path.is_file():  # a pipe would wait for a writer
            raise ValueError("there is no such file" if not path.exists() else "it is no file")
        if path.suffix == ".npy":
            row = _map_npy(path)
        elif dtype is None:
            raise ValueError("a raw file needs dtype=, such as 'uint16'")
        elif path.stat().st_size % np.dtype(dtype).itemsize:
            raise ValueError(f"{path.stat().st_size} bytes are no whole number of {dtype}")
        else:
            row = np.memmap(path, dtype=dtype, mode="r")
    except Exception as error:  # numpy parses a header with Python's parser, which raises anything
        shown_path = reprlib.repr(str(path)) if len(str(path)) > _SHOWN_CHARS else path
        raise ConfigError(f"{shown_path}: no token file: {str(error)[:_SHOWN_CHARS]}") from None
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: expected one row of integers, got {row.dtype} {list(row.shape)}"
        )
    return row


def _map_npy(path: Path) -> np.ndarray:
    """Map a file of numpy.save. **Raises** ValueError or another error if it is none."""
    with path.open("rb") as file:
        head = file.read(12)
    size = int.from_bytes(head[8:10] if head[6:7] == b"\x01" else head[8:12], "little")
    if head[:6] != b"\x93NUMPY" or size > _MAX_HEADER_BYTES:
        raise ValueError(
            "expected what numpy.save(path, tokens) writes, with tokens one row of integers, and "
            f"got a file that begins with {head[:8]!r}"
            + (f" and claims a header of {size} bytes" if head[:6] == b"\x93NUMPY" else "")
        )
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:
        raise ValueError(
            f"its header is damaged, or it was cut short ({type(error).__name__} "
            f"{str(error)[:_SHOWN_CHARS]}); write it again with numpy.save(path, tokens)"
        ) from None
