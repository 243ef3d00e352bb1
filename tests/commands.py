"""Commands of `shardwise` for tests, in this process."""

from shardwise.cli.main import app


def call_command(command, arguments):
    """Run one command in this process and return its exit code."""
    words = [command, *arguments]
    return int(app(words, prog_name="shardwise", standalone_mode=False) or 0)
