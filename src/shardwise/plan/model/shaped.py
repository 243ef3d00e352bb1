"""A model to plan for whose tapes are its shape's formulas, for degrees that no trace shows."""

from collections import Counter
from dataclasses import replace

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.activations import Implementation
from shardwise.plan.model.execution import Execution, stream_bytes
from shardwise.plan.model.shape_tape import Least, least_of, shape_tape
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import Tape
from shardwise.plan.sizes import PRECISIONS, row_of


class ShapedModel:
    """The tapes of a decoder of a shape, for windows of ``seq`` tokens, on one of its ranks.

    Where layers do not divide into the pipeline's stages, the first stages have one more.
    It is run as `shardwise train` runs its decoder, or as ``eager`` says, in eager PyTorch, unless
    the candidate has compiled kernels. ``notes`` are what the user should know of its source.

    **Raises** ConfigError, when a tape is asked for, naming a degree that the shape cannot have.
    """

    def __init__(
        self,
        name: str,
        shape: DecoderShape,
        seq: int,
        *,
        eager: Implementation = "decoder",
        notes: tuple[str, ...] = (),
    ) -> None:
        if seq < 1 or (shape.positions and seq > shape.positions):
            most = f" to {shape.positions}" if shape.positions else ""
            raise ConfigError(f"seq={seq}: {name} takes windows of 1{most} tokens")
        self.name = name
        self.seq = seq
        self._shape = shape
        self._eager, self._notes = eager, notes
        self._tapes: dict[Execution, Tape] = {}
        self._least: dict[Execution, Least] = {}

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return self._shape.num_params

    @property
    def num_experts(self) -> int:
        """Number of routed experts of a layer; 0: it is dense."""
        return self._shape.experts.num if self._shape.experts is not None else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the tapes are made."""
        how = "by the formulas of the model's shape, with flash attention; nothing is traced"
        if self._shape.experts is None:
            return *self._notes, how
        return (
            *self._notes,
            how,
            "routers are taken to send as many tokens to each expert as to any other",
        )

    def check_degrees(self, candidate: Candidate) -> None:
        """Refuse degrees that the shape cannot have. **Raises** ConfigError, naming one."""
        _check_degrees(self._shape, self.seq, candidate)

    def tape(self, candidate: Candidate, stage: int = 0) -> Tape:
        """Return one rank's micro-batch; with a pipeline, on one of its stages."""
        return self._tape(self._execution(candidate, stage))

    def least(self, candidate: Candidate) -> Least:
        """Return what a micro-batch costs and holds on the first stage, at least."""
        run = self._execution(candidate)
        if run not in self._least:
            self._least[run] = least_of(self._padded(run), run)
        return self._least[run]

    def stages(self, candidate: Candidate) -> dict[int, Tape]:
        """Return one micro-batch on a rank of each pipeline stage that no other is like.

        Of stages in the middle whose layers are of the same kinds, it is the first one, which has
        most micro-batches in flight.
        """
        found: dict[object, tuple[int, Execution]] = {}
        for stage in range(candidate.pp):
            run = self._execution(candidate, stage)
            first, num = run.first_here(self._shape), run.layers_here(self._shape)
            kinds = Counter(self._shape.of_layer(first + i) for i in range(num))
            alike = (run.first, run.last, frozenset(kinds.items()))
            found.setdefault(alike, (stage, run))
        return {stage: self._tape(run) for stage, run in found.values()}

    def boundary_bytes(self, candidate: Candidate) -> int:
        """Return the bytes of a micro-batch that a rank sends to the next stage."""
        return stream_bytes(self._shape, self._execution(candidate))

    def _execution(self, candidate: Candidate, stage: int = 0) -> Execution:
        self.check_degrees(candidate)
        each, more = divmod(self._shape.layers, candidate.pp)
        is_compiled = candidate.kernels == "compiled"
        return Execution(
            candidate.micro_batch,
            self.seq,
            activation_checkpointing=candidate.activation_checkpointing,  # type: ignore[arg-type]
            tp=candidate.tp,
            sequence_parallel=candidate.tp > 1,
            pipeline=candidate.pp,
            pipeline_rank=stage,
            rank_layers=each + (stage < more),
            first_layer=stage * each + min(stage, more),
            micro_batches=candidate.accumulation,
            all_forward_first=candidate.pp_schedule == "gpipe",
            cp=candidate.cp,
            cp_method=candidate.cp_method,
            ep=candidate.ep,
            dtype=row_of(PRECISIONS, candidate.precision, "precision").compute,
            implementation=self._eager if candidate.kernels == "eager" else "compiled",
            # Compiled layers have the bytes of theirs by the table of losses.
            loss="freed" if is_compiled and candidate.loss == "eager" else candidate.loss,
            keeps_outputs=True,
            large_units=True,
            on_cpu=candidate.transport == "point_to_point",
        )

    def _tape(self, run: Execution) -> Tape:
        if run not in self._tapes:
            self._tapes[run] = shape_tape(self._padded(run), run, name=self.name)
        return self._tapes[run]

    def _padded(self, run: Execution) -> DecoderShape:
        """Pad the vocabulary to a multiple of the ranks that share it, as Megatron-LM does."""
        return replace(self._shape, vocab=-(-self._shape.vocab // run.tp) * run.tp)


def _check_degrees(shape: DecoderShape, seq: int, candidate: Candidate) -> None:
    """Refuse degrees that leave a rank with a part of a head, of a token or of a layer."""
    tensor, context = candidate.tp, candidate.cp
    experts = shape.experts
    widths = [(shape.heads, "heads")]
    if experts is None or experts.dense_layers:
        widths.append((shape.ffn, "columns of the feed-forward"))
    if experts is not None and experts.shared:
        widths.append((experts.shared * experts.ffn, "columns of the shared experts"))
    for size, what in widths:
        if size % tensor:
            raise ConfigError(f"tp={tensor}: expected a divisor of the model's {size} {what}")
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        raise ConfigError(
            f"tp={tensor}: expected a divisor or a multiple of the model's "
            f"{shape.kv_heads} key-value heads"
        )
    if candidate.pp > shape.layers:
        raise ConfigError(
            f"pp={candidate.pp}: expected at most one stage for each "
            f"of the model's {shape.layers} layers"
        )
    if seq % context:
        raise ConfigError(f"cp={context}: expected a divisor of the windows' {seq} tokens")
    heads = shape.heads // tensor
    if candidate.cp_method == "heads" and heads % context:
        raise ConfigError(
            f"cp={context}: by heads, expected a divisor of the {heads} heads that a rank has; "
            "take cp_method gather"
        )
    if candidate.cp_method == "ring" and context > 1 and seq % (2 * context):
        raise ConfigError(
            f"cp={context}: by ring, expected 2 x cp to divide the windows' {seq} tokens; take "
            "cp_method gather"
        )
    num = 0 if experts is None or experts.dense_layers >= shape.layers else experts.num
    if candidate.ep > 1 and (not num or num % candidate.ep):
        have = f"{num} experts" if num else "experts, and it has none"
        raise ConfigError(f"ep={candidate.ep}: expected a divisor of the model's {have}")
    region = candidate.num_shards * context * tensor
    if region % candidate.ep:
        raise ConfigError(
            f"ep={candidate.ep}: expected a divisor of dp_shard x cp x tp = {candidate.num_shards} "
            f"x {context} x {tensor} = {region}"
        )
