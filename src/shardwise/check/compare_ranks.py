"""Detection of silent corruption: replicated state must be bit-identical on all its ranks.

Note [Which ranks hold copies]
Shards and their optimizer state have copies along the replicate axis, and at stage 0 on every rank.
Tensors that tensor parallelism does not cut also have copies along its axis. Optimizer scalars
(``step``) and fresh full parameters are the same on every rank. Buffers are not compared, because
batch statistics may differ by rank.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import xxhash
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor

from shardwise.comm.collective_key import name_ranks
from shardwise.comm.collectives import Comm
from shardwise.comm.control import Control, exchange_any
from shardwise.engine.agreement import find_difference
from shardwise.errors import ReplicaError
from shardwise.parallel.parts import Model, Optimizer, Parts, StageOptimizers
from shardwise.tensor.inner import plain_parts
from shardwise.unit.states import ParamState
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Unit

_DIGEST_BYTES = 16
_MAX_SHOWN = 3


@dataclass(frozen=True)
class _CopiedTensor:
    """One tensor with copies: its name, and True if every rank has it, not only replicas."""

    label: str
    everywhere: bool
    digest: bytes


def check_replicas(model: Model, optimizer: Optimizer | None = None) -> None:
    """Check that replicated state is bit-identical on all its ranks; every rank calls it.

    It compares parameters and optimizer state between ranks with the same slices (all ranks at
    stage 0, the other replicas with a replicate axis), optimizer scalars, and full parameters that
    are in memory and current. Call it between steps, at intervals. Without copies (one rank, or
    stages 1 to 3 without a replicate axis, between steps) it compares little. For a pipeline, pass
    all stages of the rank, and their optimizers; tied copies are compared too.

    **Cost** one pass of xxh3-128 over all copies (read through the CPU), one exchange of 32 bytes
    per rank. Ranks that differ also exchange 16 bytes per tensor.

    **Raises** ReplicaError, the same on all ranks, with the parameter, its tensor, and the rank
    that differs from the majority (with two copies, both).
    """
    engine = Parts(model)
    engine.finish_pending_work("check_replicas()")
    joined = None if optimizer is None else StageOptimizers(optimizer)
    errors = list(_mesh_errors(engine, joined))
    if engine.all_ranks is not engine.comm.control:
        rows = exchange_any(engine.all_ranks, "".join(errors[:1]).encode())
        errors = [row.decode() for row in rows if row]  # so that all ranks raise together
    if errors:
        raise ReplicaError(errors[0])
    if engine.all_ranks is not engine.comm.control:
        _check_uncut(engine, joined)
    if engine.has_stages:
        _check_tied(engine, joined)


def _mesh_errors(engine: Parts, optimizer: StageOptimizers | None) -> Iterator[str]:
    """Yield the error of each mesh, the same on every rank of the mesh."""
    for comm in engine.comms:
        try:
            _check_over(comm, engine, optimizer)
        except ReplicaError as error:
            yield str(error)


def _check_uncut(engine: Parts, optimizer: StageOptimizers | None) -> None:
    """Check tensors that tensor parallelism does not cut, over ranks with one place in the mesh."""
    control, stages = engine.all_ranks, engine.comm.axes.stages
    place = engine.comm.control.rank.to_bytes(4) + (stages.rank if stages else 0).to_bytes(4)
    entries = list(_uncut_entries(engine, optimizer))
    rows = control.exchange(place + _digest_of(entries, True))
    groups: dict[bytes, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row[:8], []).append(rank)
    if all(len({rows[rank] for rank in ranks}) == 1 for ranks in groups.values()):
        return
    rows = exchange_any(control, json.dumps({e.label: e.digest.hex() for e in entries}).encode())
    digests_of = [json.loads(row) for row in rows]  # by rank
    differences = []
    for ranks in groups.values():
        labels = digests_of[ranks[0]].keys()
        if any(digests_of[rank].keys() != labels for rank in ranks):
            members = [control.members[rank] for rank in ranks]
            raise _different_tensors(f"{name_ranks(members)} differ")
        for label in labels:
            blame = _blame(
                control, ranks, [bytes.fromhex(digests.get(label, "")) for digests in digests_of]
            )
            differences += [f"{label}: {blame}"] if blame else []
    raise _corrupted(differences)


def _uncut_entries(engine: Parts, optimizer: StageOptimizers | None) -> Iterator[_CopiedTensor]:
    """Yield this rank's slices that other ranks along axes of tensor parallelism have too."""
    for param in (
        p for unit in engine.units if unit.comm in engine.dense_comms for p in unit.params
    ):
        outer = param.cut.outer
        if outer is None or all(placement.is_replicate() for placement in outer.placements):
            yield _CopiedTensor(f"parameter '{param.name}', value", True, _digest(param.sharded))
            state = {} if optimizer is None else optimizer.state.get(param.sharded, {})
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                if isinstance(value, torch.Tensor):
                    yield _CopiedTensor(f"parameter '{param.name}', {key}", True, _digest(value))


def _check_tied(engine: Parts, optimizer: StageOptimizers | None) -> None:
    """Check a tied parameter's copies on several stages, between ranks with the same slice."""
    control, stages = engine.all_ranks, engine.comm.axes.stages
    assert stages is not None
    local: dict[str, list[str]] = {}
    tied = [(p, p.tie) for unit in engine.units for p in unit.params if p.tie is not None]
    for param, tie in tied:
        state = {} if optimizer is None else optimizer.state.get(param.sharded, {})
        tensors = {"value": param.sharded, **{k: v for k, v in state.items() if torch.is_tensor(v)}}
        for key, tensor in tensors.items():
            label = f"parameter '{tie.name}', {key}"
            local.setdefault(label, []).append(_digest(tensor).hex())
    ranks = get_process_group_ranks(stages.group)
    rows = exchange_any(control, json.dumps([ranks, local]).encode())
    by_rank = dict(zip(control.members, map(json.loads, rows), strict=True))
    differences: dict[str, None] = {}
    for ranks, digests in by_rank.values():
        for label in digests:
            owners = [rank for rank in ranks if label in by_rank[rank][1]]
            if len({digest for rank in owners for digest in by_rank[rank][1][label]}) > 1:
                text = f"{label}: {name_ranks(owners)} differ, stages that it is tied over"
                differences[text] = None
    if differences:
        raise _corrupted(list(differences))


def _check_over(comm: Comm, engine: Parts, optimizer: StageOptimizers | None) -> None:
    """Check the units of one mesh."""
    control = comm.control
    if control.num_ranks == 1:
        return
    units = [unit for unit in engine.units if unit.comm is comm]
    entries = list(_entries(units, comm, optimizer))
    rows = control.exchange(_digest_of(entries, True) + _digest_of(entries, False))
    copies = _Copies(len(rows), comm.axes.shard.size, engine.replicas_differ)
    halves = ((True, slice(_DIGEST_BYTES)), (False, slice(_DIGEST_BYTES, None)))
    if any(
        len({rows[rank][half] for rank in ranks}) > 1
        for everywhere, half in halves
        for ranks in copies.of(everywhere)
    ):
        _refuse(control, entries, copies)


@dataclass(frozen=True)
class _Copies:
    """The ranks that hold copies of a tensor; ``differ``: replicas have different tensors."""

    num_ranks: int
    num_shards: int
    differ: bool

    def of(self, everywhere: bool) -> list[range]:
        """Return the groups of ranks with one copy each."""
        if self.differ:
            size = self.num_shards if everywhere else 1
            return [range(first, first + size) for first in range(0, self.num_ranks, size)]
        step = 1 if everywhere else self.num_shards
        return [range(first, self.num_ranks, step) for first in range(step)]


def _digest_of(entries: list[_CopiedTensor], everywhere: bool) -> bytes:
    lines = (f"{e.label} {e.digest.hex()}\n" for e in entries if e.everywhere is everywhere)
    return xxhash.xxh3_128_digest("".join(lines).encode(errors="backslashreplace"))


def _entries(
    units: list[Unit], comm: Comm, optimizer: StageOptimizers | None
) -> Iterator[_CopiedTensor]:
    """Yield the digest of every tensor of this rank with a copy on another rank."""
    replicate = comm.axes.replicate
    for unit in units:
        sharded = unit.settings.stage.shards_state
        has_copies = not sharded or (replicate is not None and replicate.size > 1)
        for param in unit.params:
            label = f"parameter '{param.name}'"
            if has_copies:
                yield _CopiedTensor(
                    f"{label}, value", not sharded, _digest(param.sharded.to_local())
                )
            if param.has_storage and _has_fresh_copy(unit, param.storage):
                begin = param.storage.layout.full_offset(param.index)
                full = param.storage.full[begin : begin + param.full.numel()]
                yield _CopiedTensor(f"{label}, full copy", True, _digest(full))
            state = {} if optimizer is None else optimizer.state.get(param.sharded, {})
            items = sorted(state.items(), key=lambda item: str(item[0]))
            tensors = [(key, value) for key, value in items if isinstance(value, torch.Tensor)]
            if param.cut.owner is not None:  # one entry, as other ranks may lack its state
                digest = xxhash.xxh3_128_digest(b"".join(_digest(value) for _, value in tensors))
                if has_copies:
                    yield _CopiedTensor(f"{label}, state", False, digest)
                continue
            for key, value in tensors:
                scalar = value.ndim == 0 and not isinstance(value, DTensor)
                if scalar or has_copies:
                    yield _CopiedTensor(f"{label}, {key}", scalar or not sharded, _digest(value))


def _has_fresh_copy(unit: Unit, storage: Storage) -> bool:
    """Return True if the full copy is persistent, complete, and separate from the slices.

    A temporary copy must not be passed to numpy: its storage could then not be freed.
    """
    is_value = storage.memory.aliased and not storage.memory.needs_gather
    is_complete = storage.is_fresh and unit.gather.state is not ParamState.GATHERING
    return is_complete and not is_value and not storage.frees


def _digest(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    digest = xxhash.xxh3_128()
    for part in plain_parts(local).values():
        flat = part.contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def _refuse(control: Control, entries: list[_CopiedTensor], copies: _Copies) -> NoReturn:
    """Compare each tensor, and raise the same error on every rank."""
    _check_labels(control, entries)
    rows = control.exchange(b"".join(e.digest for e in entries))
    raise _corrupted(list(_differences(control, rows, entries, copies)))


def _check_labels(control: Control, entries: list[_CopiedTensor]) -> None:
    missing = find_difference(control, [e.label for e in entries], "copies of state")
    if missing is not None:
        raise _different_tensors(missing)


def _different_tensors(difference: str) -> ReplicaError:
    return ReplicaError(
        f"check_replicas: the ranks do not hold the same tensors: {difference}. Load or create "
        "state on all ranks, or on none"
    )


def _corrupted(differences: list[str]) -> ReplicaError:
    shown = "; ".join(differences[:_MAX_SHOWN])
    num_more = len(differences) - _MAX_SHOWN
    more = f"; {num_more} further tensors" if num_more > 0 else ""
    return ReplicaError(
        f"check_replicas: copies that must have the same bits differ: {shown}{more}. Memory or an "
        "accelerator failed, or one rank alone wrote to its copy: go back to the last checkpoint, "
        "and test that rank's machine"
    )


def _differences(
    control: Control, rows: list[bytes], entries: list[_CopiedTensor], copies: _Copies
) -> Iterator[str]:
    for number, entry in enumerate(entries):
        begin = number * _DIGEST_BYTES
        digests = [row[begin : begin + _DIGEST_BYTES] for row in rows]
        for ranks in copies.of(entry.everywhere):
            blame = _blame(control, ranks, digests)
            if blame:
                yield f"{entry.label}: {blame}"


def _blame(control: Control, ranks: Sequence[int], digests: list[bytes]) -> str:
    """Describe the ranks that differ from the majority; "" if all agree."""

    def named(numbers: Sequence[int]) -> str:
        return name_ranks([control.members[number] for number in numbers])

    ((common, votes), *others) = Counter(digests[r] for r in ranks).most_common()
    if not others:
        return ""
    if 2 * votes <= len(ranks):
        return f"{named(ranks)} differ from each other, and no majority tells which is right"
    odd = [r for r in ranks if digests[r] != common]
    most = [r for r in ranks if digests[r] == common]
    return f"{named(odd)} differ{'s' if len(odd) == 1 else ''} from {named(most)}"
