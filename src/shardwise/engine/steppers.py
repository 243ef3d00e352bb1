"""Attaches what steps units in its own way, if a model has such units.

The core does not import the rooms below it. They are loaded by name here, when a model needs them.
"""

from collections.abc import Sequence
from importlib import import_module

from shardwise.unit.unit import Unit


def attach_steppers(units: Sequence[Unit]) -> None:
    """Let optimizers step offloaded units, and matrices that have an owner, as these need it."""
    if any(unit.home is not None for unit in units):
        import_module("shardwise.step.overlap").overlap_offloaded()
    if any(param.cut.owner is not None for unit in units for param in unit.params if param.cut):
        import_module("shardwise.step.whole_matrices").step_matrices_whole()
