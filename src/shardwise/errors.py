"""The exceptions that Shardwise raises on purpose.

ShardwiseError
├── ConfigError            a setting is unknown, out of range, or does not fit the model or the mesh
├── StateError             a call came at a moment when it has no right answer
│   └── IllegalTransition  our own state tables were violated; a bug, please report it
├── ShardError             an operation that would be wrong on a slice of a tensor
└── CollectiveError        communication failed, as a rule because another rank died or raised

Every message says which rank, unit or setting, what was expected, what came, and what to do.
"""


class ShardwiseError(Exception):
    """Base of everything that Shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A setting is unknown, out of range, or does not fit the model or the mesh."""


class StateError(ShardwiseError, RuntimeError):
    """A call came at a moment when it has no right answer."""


class IllegalTransition(StateError):
    """A unit was asked for a state change that its table does not hold."""


class ShardError(ShardwiseError, RuntimeError):
    """An operation would have given this rank's slice where the whole tensor was asked for."""


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective failed; the message names it, its unit, its axis and this rank."""
