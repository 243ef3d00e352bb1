"""The exceptions that Shardwise raises on purpose.

ShardwiseError
├── ConfigError            a setting is unknown, out of range, or does not fit the model or the mesh
├── StateError             a call came at a moment when it has no right answer
│   ├── IllegalTransition  our own state tables were violated; a bug, please report it
│   ├── ReplicaError       copies of one tensor differ between ranks; names the tensor and the rank
│   └── GradientError      gradients are not those of one process; names them and the factor
├── ShardError             an operation that would be wrong on a slice of a tensor
├── CollectiveError        communication failed, as a rule because another rank died or raised
├── StorageError           a file that state was offloaded to could not be made, read or written
└── CheckpointError        a checkpoint could not be written, found or read
    └── DamagedCheckpoint  its bytes are not those that were saved; names the file and the tensor

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


class ReplicaError(StateError):
    """State that several ranks hold has other bits on one of them; the same text on every rank."""


class GradientError(StateError):
    """A composed model has other gradients than one process with the whole batch."""


class ShardError(ShardwiseError, RuntimeError):
    """An operation would have given this rank's slice where the whole tensor was asked for."""


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective failed; the message names it, its unit, its axis and this rank."""


class StorageError(ShardwiseError, RuntimeError):
    """A file of offloaded state could not be made, read or written; names rank, unit and folder."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint could not be written, found or read; the same text on every rank."""


class DamagedCheckpoint(CheckpointError):
    """The bytes of a checkpoint are not those that were saved, or not all of them are there."""
