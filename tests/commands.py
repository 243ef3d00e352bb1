"""Commands of `shardwise` for tests, in this process."""

from collections.abc import Sequence

from shardwise.cli.main import app


def call_command(command: str, arguments: Sequence[str]) -> int:
    """Run one command in this process and return its exit code."""
    words = [command, *arguments]
    return int(app(words, prog_name="shardwise", standalone_mode=False) or 0)
