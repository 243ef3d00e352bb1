"""Agreement of ranks at the start: the same facts, and room for all on every host.

Values that all ranks must share are written as lines of text (facts). Ranks exchange a digest of
the facts, and the text only if digests differ.
"""

import hashlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import __version__
from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import Control, naming
from shardwise.config import Init, ShardConfig
from shardwise.engine.adoption import Adoption
from shardwise.errors import ConfigError, ShardwiseError, StorageError
from shardwise.homes import Offload, folders_of
from shardwise.host import available_host_bytes
from shardwise.layout.placements import local_of
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.mesh import Axis, DataAxes
from shardwise.quantities import format_bytes
from shardwise.stages import Stage
from shardwise.unit.materialize import num_units_on_device

_LOG = logging.getLogger("shardwise")
_HOST_ROW = struct.Struct("<16sQQ")  # host, bytes that the rank needs, bytes free
HOST_ROW_BYTES = _HOST_ROW.size


def host_row(specs: Sequence[UnitSpec], config: ShardConfig, axis: Axis) -> bytes:
    """Return this rank's host, the memory that it needs there and the free memory, in 32 bytes."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=16).digest()
    free = 0 if config.state_offload is None else available_host_bytes()
    return _HOST_ROW.pack(host, bytes_in_host_memory(specs, config, axis), free)


def check_host_room(control: Control, config: ShardConfig, packed: Sequence[bytes]) -> None:
    """Check that each host has memory for its ranks' offloaded state, from all `host_row` values.

    Counts slices and reduced gradients; the optimizer's state is not known yet. Warns on rank 0 if
    the step would use one thread although each rank has several cores.

    **Raises** ConfigError, the same on all ranks, with the needed and free bytes and the remedies.
    """
    if config.state_offload is None:
        return
    rows = [_HOST_ROW.unpack(row) for row in packed]
    host = rows[control.rank][0]
    for other in dict.fromkeys(row[0] for row in rows):
        ranks = [rank for rank, row in enumerate(rows) if row[0] == other]
        total = sum(rows[rank][1] for rank in ranks)
        free = min(rows[rank][2] for rank in ranks)
        if total > free:
            first = control.members[ranks[0]] if control.members else 0
            raise ConfigError(
                f"offload: the {len(ranks)} ranks on the host of rank {first} "
                f"need {format_bytes(total)} of its memory for slices and gradients, and "
                f"{format_bytes(free)} are free there. Use more hosts, offload less (fraction=), "
                "or keep them in files (params= and grads='nvme:FOLDER')"
            )
    cores = len(os.sched_getaffinity(0)) // sum(row[0] == host for row in rows)
    is_on_host = config.state_offload.step_on == "host"
    if is_on_host and torch.get_num_threads() == 1 < cores and control.rank == 0:
        _LOG.warning(
            "the optimizer steps on the host, with 1 thread where each rank has %d cores: call "
            "torch.set_num_threads(), or shardwise.overlap(optimizer, threads=%d)",
            cores,
            cores,
        )


def bytes_in_host_memory(specs: Sequence[UnitSpec], config: ShardConfig, axis: Axis) -> int:
    """Return the bytes of this rank's slices and reduced gradients on the host, without padding."""
    offload = config.state_offload
    if offload is None:
        return 0
    holds_slices = not folders_of(offload.params)
    holds_means = not folders_of(offload.grads)
    ranks = axis.size if config.stage.shards_state else 1
    total = 0
    for spec in specs[num_units_on_device(specs, config) :]:
        for param in spec.params:
            copies = holds_slices + (holds_means and param.param.requires_grad)
            numel = local_of(param.param).numel()
            share = -(-numel // ranks)
            if param.owner is not None and ranks > 1:
                share = numel if param.owner == axis.rank else 0
            total += copies * share * _master_bytes(param, config)
    return total


def _master_bytes(spec: ParamSpec, config: ShardConfig) -> int:
    dtype = spec.param.dtype
    master = config.precision.master
    if master is not None and spec.param.requires_grad and dtype.is_floating_point:
        return master.itemsize
    return dtype.itemsize


_DIGEST_BYTES = 16
_ROW_BYTES = 1024
_INDEX = struct.Struct("<q")
_MAX_SHOWN = 3
_SAME_START = "Start every rank with the same code, the same settings and the same model"


def agree(
    control: Control,
    facts: Sequence[str],
    what: str,
    remedy: str = _SAME_START,
    row: bytes = b"",
) -> list[bytes]:
    """Check that all ranks have the same facts (lines of text); return every rank's ``row``.

    ``what`` begins an error's message. Rows must have the same length on all ranks.

    **Cost** one exchange of 16 bytes and the row per rank. If ranks differ, also rank 0's text and
    1 KiB per rank. A single rank sends nothing.

    **Raises** ConfigError, the same on all ranks, naming the ranks and the first fact that differs.
    """
    with naming(what):
        difference, rows = _compare(control, facts, what, row)
    if difference is not None:
        raise ConfigError(f"{what}: the ranks differ: {difference}. {remedy}")
    return rows


def find_difference(control: Control, facts: Sequence[str], about: str) -> str | None:
    """Return the first facts in which ranks differ from rank 0, the same text on all ranks.

    ``about`` describes the exchange in the timeout error of a rank that waits for the others.
    """
    return _compare(control, facts, about, b"")[0]


def _compare(
    control: Control, facts: Sequence[str], about: str, row: bytes
) -> tuple[str | None, list[bytes]]:
    if control.num_ranks == 1:
        return None, [row]
    text = "\n".join(facts).encode(errors="backslashreplace")
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    received = control.exchange(digest + row, about)
    rows = [message[_DIGEST_BYTES:] for message in received]
    if len({message[:_DIGEST_BYTES] for message in received}) == 1:
        return None, rows
    return _exchange_differences(control, text), rows


def _exchange_differences(control: Control, text: bytes) -> str:
    """Exchange each rank's first fact that differs from rank 0's; return them as one text."""
    facts_of_rank_0 = control.broadcast(text).split(b"\n")
    pairs = enumerate(zip_longest(facts_of_rank_0, text.split(b"\n"), fillvalue=b""))
    index, fact = next(((i, fact) for i, (first, fact) in pairs if first != fact), (-1, b""))
    row = (_INDEX.pack(index) + fact)[:_ROW_BYTES].ljust(_ROW_BYTES, b"\0")
    ranks_with: dict[tuple[int, bytes], list[int]] = {}
    for rank, received in enumerate(control.exchange(row)):
        (index,) = _INDEX.unpack_from(received)
        if index >= 0:
            fact = received[_INDEX.size :].rstrip(b"\0")
            ranks_with.setdefault((index, fact), []).append(rank)
    parts = []
    for (index, fact), ranks in sorted(ranks_with.items(), key=lambda item: (item[0][0], item[1])):
        first = facts_of_rank_0[index] if index < len(facts_of_rank_0) else b""
        parts.append(describe_difference(ranks, _show(fact), 0, _show(first)))
    if len(parts) > _MAX_SHOWN:
        parts[_MAX_SHOWN:] = [f"{len(parts) - _MAX_SHOWN} further differences"]
    return "; ".join(parts)


def describe_difference(ranks: Sequence[int], fact: str, other: int, other_fact: str) -> str:
    """Return the fact of ``ranks`` and that of rank ``other`` as a sentence."""
    has = "has" if len(ranks) == 1 else "have"
    return f"{name_ranks(ranks)} {has} {fact} where rank {other} has {other_fact}"


def _show(fact: bytes) -> str:
    """Return a fact as text, without a character that was cut in the middle."""
    cut = fact[: _ROW_BYTES - _INDEX.size]
    return f"[{cut.decode(errors='ignore')}]" if fact else "nothing more"


def refusal_facts(refusal: Exception | None) -> list[str]:
    """Return this rank's error, or its absence, as the fact that is compared first."""
    if refusal is None:
        return ["no error"]
    return [f"{type(refusal).__name__}: {' '.join(str(refusal).split())}"]


def make_room(control: Control, work: Callable[[], None]) -> None:
    """Reserve space or memory with ``work`` on all ranks; fail on all if it fails on one.

    ``work`` must change nothing if it raises. It may take long.

    **Cost** an exchange of one byte. If a rank fails, also one of 1 KiB.

    **Raises** the error of ``work``; on the other ranks StorageError with the first error's text.
    """
    failure: Exception | None = None

    def attempt() -> bytes:
        nonlocal failure
        try:
            work()
        except Exception as error:  # sent to the other ranks, and raised below
            failure = error
        return bytes([failure is not None])

    if any(row[0] for row in control.exchange_after(attempt, 1)):
        text = "" if failure is None else _describe_failure(control, failure)
        rows = control.exchange(text.encode()[:_ROW_BYTES].ljust(_ROW_BYTES, b"\0"))
        texts = [row.rstrip(b"\0").decode(errors="ignore") for row in rows]
        raise failure or StorageError(
            f"{next(filter(None, texts))}. That rank has failed, so nothing was changed on this one"
        )


def _describe_failure(control: Control, failure: Exception) -> str:
    if isinstance(failure, ShardwiseError):
        return str(failure)
    rank = control.members[control.rank] if control.members else 0
    return f"rank {rank}: {type(failure).__name__}: {failure}"


def any_rank(control: Control, flag: bool) -> bool:
    """Tell whether ``flag`` is true on any rank. **Cost** an exchange of one byte."""
    return any(row[0] for row in control.exchange(bytes([flag])))


def start_facts(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    config: ShardConfig,
    axes: DataAxes,
    init: Init | None,
    adoption: Adoption,
) -> list[str]:
    """Return the facts that `shard` compares between ranks: code, settings and model."""
    facts = refusal_facts(None)
    facts += [f"shardwise {__version__}", f"torch {torch.__version__}"]
    for setting in fields(config):
        value = getattr(config, setting.name)
        if isinstance(value, Offload):  # ranks may have different disks
            value = value.tiers
        facts.append(f"{setting.name}={value.number if isinstance(value, Stage) else value}")
    facts.append(f"init={getattr(init, '__qualname__', type(init).__name__)}")
    mesh = axes.mesh
    facts.append(
        f"mesh of {axes}, {mesh.device_type}, "
        f"axes {mesh.mesh_dim_names or '(unnamed)'}, ranks {mesh.mesh.tolist()}"
    )
    for unit in specs:
        kind = ", optional" if unit.optional else ""
        where = f", on {unit.axes}" if unit.axes else ""
        facts.append(f"unit '{unit.name or '(root)'}' ({type(unit.module).__name__}){kind}{where}")
    for unit in specs:
        for param in unit.params:
            facts += _param_facts(param, unit.name or "(root)")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        facts.append(f"buffer '{name}' {_describe(buffer)}")
    return facts + adoption.facts()


def _param_facts(spec: ParamSpec, unit: str) -> Iterator[str]:
    kind = "trainable" if spec.param.requires_grad else "frozen"
    dim = f", cut along dim {spec.dim}" if spec.dim else ""
    dim += "" if spec.owner is None else f", whole on rank {spec.owner} of the shard axis"
    dim += f", {len(hooks)} hooks" if (hooks := spec.param._post_accumulate_grad_hooks) else ""
    yield f"parameter '{spec.name}' {_describe(spec.param)}, {kind}, unit '{unit}'{dim}"
    for use in spec.uses[1:]:
        yield f"parameter '{spec.name}' tied to '{use.name}'"


def _describe(tensor: torch.Tensor) -> str:
    place = " on meta" if tensor.is_meta else ""
    placed = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{placed}{place}"
