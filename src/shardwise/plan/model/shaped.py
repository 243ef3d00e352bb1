"""A model to plan for whose tapes are its shape's formulas, for degrees that no trace shows."""

from __future__ import annotations

from shardwise.plan.candidate import Candidate
from shardwise.plan.model.execution import Execution
from shardwise.plan.model.shape_tape import shape_tape
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import Tape
from shardwise.plan.sizes import PRECISIONS, row_of


class ShapedModel:
    """The tapes of a decoder of a shape, for windows of ``seq`` tokens, on one of its ranks.

    With a pipeline it is the rank of the first stage, which has most micro-batches in flight.
    """

    def __init__(self, name: str, shape: DecoderShape, seq: int) -> None:
        self.name = name
        self.seq = seq
        self._shape = shape
        self._tapes: dict[Execution, Tape] = {}

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return self._shape.num_params

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the tapes are made."""
        return (
            "by the formulas of the model's shape, with fused kernels and flash attention: tensor, "
            "pipeline and context degrees and selective checkpointing are not traced",
        )

    def tape(self, candidate: Candidate) -> Tape:
        """Return one rank's micro-batch."""
        run = Execution(
            candidate.micro_batch,
            self.seq,
            activation_checkpointing=candidate.activation_checkpointing,  # type: ignore[arg-type]
            tp=candidate.tensor_parallel,
            sequence_parallel=candidate.tensor_parallel > 1,
            pipeline=candidate.pipeline_parallel,
            micro_batches=candidate.accumulation,
            cp=candidate.context_parallel,
            dtype=row_of(PRECISIONS, candidate.precision, "precision").compute,
        )
        if run not in self._tapes:
            self._tapes[run] = shape_tape(self._shape, run, name=self.name)
        return self._tapes[run]
