"""Models to plan for by tracing, each tape once."""

from math import prod

from shardwise.errors import ConfigError
from shardwise.plan.candidate import ALL_DEGREES, Candidate
from shardwise.plan.model.models import ModelSource
from shardwise.plan.model.tape import Tape
from shardwise.plan.model.tracing import trace
from shardwise.plan.sizes import PRECISIONS, DtypeName, row_of
from shardwise.quantities import format_count


class TracedModel:
    """The tapes of a source's module for windows of ``seq`` tokens.

    A tape depends on a candidate's micro-batch, precision, checkpointing and units alone, so a
    search over stages, ranks and buffers traces once per combination of those.

    **Raises** ConfigError for a window that the model does not take.
    """

    def __init__(self, source: ModelSource, seq: int | None = None) -> None:
        self.name = source.name
        self.seq = source.window(seq)
        self._source = source
        self._tapes: dict[object, Tape] = {}
        self._notes = dict.fromkeys(source.notes)
        self._modules = {False: source.build(False)}

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self._modules[False].parameters())

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the tapes so far were made."""
        return tuple(self._notes)

    def check_degrees(self, candidate: Candidate) -> None:
        """Refuse degrees that split the model itself. **Raises** ConfigError, naming one."""
        for name in ALL_DEGREES:
            degree = getattr(candidate, name)
            if degree != 1:
                raise ConfigError(
                    f"{name}={degree}: a traced module is whole on each rank; plan a preset or a "
                    "config by its shape instead"
                )

    def tape(self, candidate: Candidate) -> Tape:
        """Return one rank's micro-batch. It is traced at the first call.

        **Raises** ConfigError if the candidate splits the model itself, or checkpoints in part.
        """
        self.check_degrees(candidate)
        checkpointing = candidate.activation_checkpointing
        if checkpointing not in ("none", "full"):
            raise ConfigError(
                f"activation_checkpointing={checkpointing!r}: a traced module knows 'none' and "
                "'full'"
            )
        dtype = row_of(PRECISIONS, candidate.precision, "precision").compute
        key = (candidate.micro_batch, dtype, checkpointing, candidate.units)
        if key not in self._tapes:
            self._tapes[key] = self._trace(*key)
        return self._tapes[key]

    def _trace(
        self,
        micro_batch: int,
        dtype: DtypeName,
        checkpointing: str,
        units: tuple[str, ...] | None,
    ) -> Tape:
        checkpointed = checkpointing == "full"
        if checkpointed not in self._modules:
            self._modules[checkpointed] = self._source.build(checkpointed)
        try:
            tape = trace(
                self._modules[checkpointed],
                lambda: self._source.make_batch(micro_batch, self.seq),
                self._source.loss,
                name=self.name,
                compute_dtype=dtype,
                units=units,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}{self._source.fed}") from error
        params = [p for u in tape.units for p in u.params if not p.gets_grad]
        if params:
            count = format_count(sum(prod(p.shape) for p in params))
            self._notes[
                f"{count} trained parameters ({params[0].name}, ...) get no gradient, and so no "
                "optimizer state; if they are experts that the data chooses, their work is not "
                "counted"
            ] = None
        return tape
