"""Digests of bytes: xxh3-128, which finds every accident and no forgery.

Note [Chunks]
Tensors are hashed in chunks of one MiB, from the memory that holds them and not from the file that
they were written to. A reader that needs a slice of a tensor reads and checks the chunks around it,
at most two MiB more than it needs, and a chunk is still in the processor's cache when it is hashed.

xxh3-128 is a checksum: two damaged chunks in 10^38 pass. It proves nothing about who wrote them;
whoever needs that signs `manifest.json`, which holds the digest of everything else.
Source: xxHash, github.com/Cyan4973/xxHash, XXH3 128 bits.
"""

from base64 import b64encode
from collections.abc import Iterator

import xxhash

CHUNK_BYTES = 1 << 20
DIGEST_CHARS = 22  # of a chunk
DIGEST_BYTES = 16


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of some bytes: 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_digest(data: bytes | memoryview) -> str:
    """Return the digest of a chunk: 22 characters of base64, as there may be many of them."""
    return b64encode(xxhash.xxh3_128_digest(data))[:DIGEST_CHARS].decode()


def chunks_of(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges [begin, end) of the chunks of a tensor of ``num_bytes``."""
    for begin in range(0, num_bytes, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, num_bytes)


def chunk_digests(data: memoryview) -> str:
    """Return the digests of all chunks of some bytes, one after the other; "" for no bytes."""
    return "".join(chunk_digest(data[begin:end]) for begin, end in chunks_of(len(data)))


def num_chunks(num_bytes: int) -> int:
    """Return how many chunks a tensor of ``num_bytes`` has."""
    return -(-num_bytes // CHUNK_BYTES)
