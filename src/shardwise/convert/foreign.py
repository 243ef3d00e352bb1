"""What every reader of other people's folders needs: plain names, links, odd input as errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import CheckpointError, DamagedCheckpoint, ShardwiseError

_MAX_NAME_BYTES = 255


def is_plain_name(name: str) -> bool:
    """Tell whether a name, joined to a folder, can only lead to an entry of that folder."""
    try:
        fits = len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
    return fits and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def follow_link(file: Path) -> Path:
    """Return the file that a link leads to: one of its own folder, or a blob of the hub's cache.

    The cache has links ``snapshots/<revision>/...`` to files in ``blobs/``.

    **Raises** CheckpointError when a link leads elsewhere; FileNotFoundError when to nothing.
    """
    real = Path(os.path.realpath(file, strict=True))
    folder = Path(os.path.realpath(file.parent, strict=True))
    homes = [folder]
    homes += [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{file} is a link to {real}, which leads out of its folder, and is not followed: what "
            "is there may not be meant for you to copy. Put the file itself there if it is"
        )
    return real


@contextmanager
def explained(where: str, writer: str) -> Iterator[None]:
    """Turn what odd input makes Python or torch raise into a DamagedCheckpoint that names it."""
    try:
        yield
    except ShardwiseError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    except (
        *(ArithmeticError, AttributeError, LookupError, MemoryError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise DamagedCheckpoint(
            f"{where}: not as {writer} writes it: {type(error).__name__} {str(error)[:200]!a}"
        ) from None
