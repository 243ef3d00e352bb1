"""Names and block sizes of the kinds of moments; imports no torch."""

from shardwise.errors import ConfigError

KINDS = ("fp32", "bf16", "8bit")
ROW = 1 << 15  # elements; a step's spans begin at multiples of it
BLOCK = 256  # elements that share a scale, by default
ARGUMENTS = ("moments", "block")  # arguments of `AdamW` that torch's lacks


def check_kind(moments: object, block: object) -> None:
    """Check the kind's name, and that blocks fill a row. **Raises** ConfigError."""
    if moments not in KINDS:
        raise ConfigError(f"moments={moments!r}: expected one of {', '.join(map(repr, KINDS))}")
    if type(block) is not int or not 16 <= block <= ROW or ROW % block:
        raise ConfigError(
            f"block={block!r}: expected a power of two from 16 to {ROW}, the elements that share a "
            f"scale; {BLOCK} is the usual one"
        )
