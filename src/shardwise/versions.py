"""Tested versions of other libraries, and a warning for other versions."""

import re
import warnings
from functools import cache
from importlib import import_module, metadata
from types import ModuleType

from shardwise.errors import ConfigError

# The first and the last minor version that the tests of this repository passed with, both included.
TESTED = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.23", "5.23"),
    "accelerate": ("1.15", "1.15"),
    "peft": ("0.21", "0.21"),
    "lightning": ("2.6", "2.6"),
    "torchtitan": ("0.3", "0.3"),
    "torchmetrics": ("1.9", "1.9"),
}


def load_neighbour(package: str, wanted_by: str) -> ModuleType:
    """Import another library, and warn if its version was not tested.

    **Raises** ConfigError if it is not installed, with the command that installs it.
    """
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"{wanted_by} needs the package {package}, which is not installed: "
            f"pip install 'shardwise[{package}]'"
        ) from error
    warn_if_untested(package)
    return module


def warn_if_untested(package: str) -> None:
    """Warn, once per place, when the installed version is outside the tested range."""
    first, last = TESTED[package]
    try:
        version = installed_version(package)
    except metadata.PackageNotFoundError:  # imported from a checkout that was not installed
        warnings.warn(
            f"{package}: its version is unknown; Shardwise was tested with {first} to {last}",
            stacklevel=3,
        )
        return
    if not minor_of(first) <= minor_of(version) <= minor_of(last):
        warnings.warn(
            f"{package} {version} is outside the versions that Shardwise was tested with "
            f"({first} to {last}); if something is odd, try one of those first",
            stacklevel=3,
        )


@cache
def installed_version(package: str) -> str:
    """Return the version in the package's metadata; cached, as parsing takes milliseconds."""
    return metadata.version(package)


def minor_of(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``2.13.0+cpu``."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found is None:
        raise ConfigError(f"version {version!r}: expected numbers with a dot, such as 2.13.0")
    return int(found[1]), int(found[2] or 0)
