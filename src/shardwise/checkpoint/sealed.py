"""What the JSON parts of a checkpoint have in common: their seal, their limits, their names.

A part ends with the digest of all that stands before it, and nothing of it is used unchecked. Why
there is one part per rank: Note [One manifest, one index per rank] in `manifest`.
"""

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from shardwise.checkpoint.digest import digest_of
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.strict_json import check_containers, dumps, loads

FORMAT, PIECES_FORMAT = 1, 2  # what only the second has: Note [Pieces and meshes] in `manifest`
MANIFEST = "manifest.json"
MAX_PART_BYTES = 256 << 20  # of a manifest or an index; parsing takes a few times as much memory
_SEAL = b',"digest":"'
_SHOWN_CHARS = 200

Format = Annotated[int, Field(ge=FORMAT, le=PIECES_FORMAT, strict=True)]
Count = Annotated[int, Field(ge=0, lt=1 << 50, strict=True)]
Rank = Annotated[int, Field(ge=0, lt=1 << 24, strict=True)]
Shape = Annotated[tuple[Count, ...], Field(max_length=32)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(max_length=4096)]
_T = TypeVar("_T")
Rows = Annotated[tuple[_T, ...], FailFast()]  # a million wrong rows are one error


class Part(BaseModel):
    """A row or a whole part: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def seal(part: Part) -> bytes:
    """Write a part as JSON whose last key is the digest of all that stands before it.

    **Raises** CheckpointError when it would be too large to be read.
    """
    body = dumps(part.model_dump(mode="json", exclude_defaults=True))[:-1]
    sealed = body + _SEAL + digest_of(body).encode() + b'"}\n'
    if len(sealed) > MAX_PART_BYTES:
        raise CheckpointError(
            f"{len(sealed)} bytes of names and values are more than a checkpoint may have "
            f"({MAX_PART_BYTES}); put large state into tensors (torch.from_numpy)"
        )
    try:
        check_containers(body)
    except ValueError as error:
        raise CheckpointError(f"names and values cannot be saved: {error}") from None
    return sealed


def unseal(data: bytes, where: str) -> Any:
    """Check the digest and return the JSON value without it. **Raises** DamagedCheckpoint."""
    body, mark, rest = data.rpartition(_SEAL)
    if not mark or rest != digest_of(body).encode() + b'"}\n':
        raise DamagedCheckpoint(f"{where}: it is damaged: its digest is not that of its content")
    try:
        return loads(body + b"}", where)
    except DamagedCheckpoint:
        raise
    except CheckpointError as error:
        raise DamagedCheckpoint(str(error)) from error


def validated(kind: type[Any], value: Any, where: str) -> Any:
    """Read a JSON value as a part. **Raises** DamagedCheckpoint naming what is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:_SHOWN_CHARS]
        raise DamagedCheckpoint(f"{where}: {place}: {first['msg']}") from None


def index_name(rank: int) -> str:
    """Return the name of a rank's index."""
    return f"rank{rank:05d}.json"


def file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file; the n-th box of a tensor lies in its n-th file."""
    return f"rank{rank:05d}-{number}.safetensors"


_NAMES = re.compile(rf"rank[0-9]{{5,8}}(\.json|-[0-9]{{1,2}}\.safetensors)|{re.escape(MANIFEST)}")


def is_ours(name: str) -> bool:
    """Tell whether a file of this name may be part of a checkpoint."""
    return _NAMES.fullmatch(name) is not None
