"""The exceptions that Shardwise raises on purpose.

A message has the rank, unit or setting, the expected and the actual value, and the remedy.
"""


class ShardwiseError(Exception):
    """Base of all exceptions that Shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A setting is unknown, out of range, or does not fit the model or the mesh.

    Change the setting that the message names. The model has not been changed.
    """


class StateError(ShardwiseError, RuntimeError):
    """A call came at a moment when it has no right answer.

    Make the call that the message names first.
    """


class IllegalTransition(StateError):
    """A unit was asked for a state change that its table does not hold.

    This is a defect of Shardwise: report it with the message.
    """


class ReplicaError(StateError):
    """Copies of one tensor have different bits on some rank; the text is the same on every rank.

    Load the last checkpoint and test the machine of the rank that is named.
    """


class GradientError(StateError):
    """A composed model has other gradients than one process with the whole batch.

    The message names the gradients, the factor, and the degree of parallelism with that factor.
    """


class ShardError(ShardwiseError, RuntimeError):
    """An operation would have given this rank's slice where the whole tensor was asked for.

    Read with `t.full_tensor()`, or change the tensor inside `shardwise.gathered`.
    """


class CollectiveError(ShardwiseError, RuntimeError):
    """A collective failed; the message names it, its unit, its axis and this rank.

    Look for the rank that failed first, and start the job again from a checkpoint.
    """


class StorageError(ShardwiseError, RuntimeError):
    """A file of offloaded state could not be made, read or written; names rank, unit and folder.

    If the message says that nothing has changed, make room and repeat; else load a checkpoint.
    """


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint could not be written, found or read; the text is the same on every rank.

    Older checkpoints are untouched. The message names the rank, the folder and the cause.
    """


class DamagedCheckpoint(CheckpointError):
    """A checkpoint has other bytes than were saved, or fewer; names the file and the tensor.

    Load an older checkpoint, and find out what damaged this one.
    """
