"""Rules about settings: units, buckets and the prefetch budget; known before the first step."""

import re
from collections import defaultdict
from statistics import median

from shardwise.monitor.doctor.evidence import Evidence
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.metrics import MIB
from shardwise.names import name_of_unit
from shardwise.stages import DEFAULT_BUCKET_BYTES
from shardwise.unit_facts import UnitFacts

_WHOLE = 1.2  # slices x ranks beyond the parameters
_UNSHARDED = 0.1
_LAYERS, _MODULES = 8, 4  # parameters, and modules that hold them, of at least several layers
_TOY_BYTES = 4 * MIB  # of a model, below which the cost of its units is negligible
_UNITS_PER_BLOCK, _SMALL_UNIT_BYTES = 4, MIB
_LARGEST, _LARGEST_IF_FELT, _FELT = 0.5, 0.3, 0.05
_NUM_OTHERS, _TIMES_NEXT = 3, 3.0
_PADDING = ((0.02, MIB), (0.2, 64 << 10))  # share, bytes
_IN_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")  # "model.layers.3" of "model.layers.3.mlp"


def not_sharded(e: Evidence) -> Finding | None:
    """Find state that is whole on several ranks at a stage that cuts it."""
    facts, shards = e.facts, e.num_shards
    if not facts.stage:
        return None
    copies = facts.degrees.get("replicate", 1)
    outside = facts.unsharded_bytes / (facts.full_bytes + facts.unsharded_bytes or 1)
    rank_bytes = sum(unit.rank_bytes for unit in facts.units)
    padded = facts.full_bytes * (1 + facts.padding_share) or 1
    evidence: dict[str, float] = {"ranks": facts.num_ranks, "shards": shards, "copies": copies}
    if shards == 1 and copies > 1:
        case, gain = "copies", rank_bytes * (1 - 1 / copies)
        evidence["bytes of one rank"] = rank_bytes
    elif outside > _UNSHARDED:
        case, gain = "outside", facts.unsharded_bytes * (1 - 1 / shards)
        evidence |= {"bytes of no unit": facts.unsharded_bytes, "share": outside}
    elif shards > 1 and rank_bytes * shards > _WHOLE * padded:
        case, gain = "uneven", rank_bytes - padded / shards
        evidence |= {"bytes of one rank": rank_bytes, "bytes of all": facts.full_bytes}
    else:
        return None
    return make_finding(f"SW001.{case}", evidence, gain=gain, stage=facts.stage)


def one_unit(e: Evidence) -> Finding | None:
    """Find a model that is a single unit."""
    held = _held(e)
    if len(held) != 1 or held[0].num_params < _LAYERS:
        return None
    unit = held[0]
    # The parameters of one module (nn.LSTM with all its layers) cannot be in several units.
    if unit.full_bytes < _TOY_BYTES or 0 < unit.num_modules < _MODULES:
        return None
    evidence = {"units": 1, "parameters": unit.num_params, "bytes": unit.full_bytes}
    return make_finding("SW002", evidence, unit=unit.name, name=name_of_unit(unit.name))


def too_fine(e: Evidence) -> Finding | None:
    """Find blocks of many small units."""
    blocks: dict[str, list[int]] = defaultdict(list)
    for unit in _held(e):
        if at := _IN_BLOCK.match(unit.name):
            blocks[at.group()].append(unit.full_bytes)
    if not blocks:
        return None
    block, sizes = max(blocks.items(), key=lambda each: len(each[1]))
    most, size = len(sizes), median(sizes)
    if most <= _UNITS_PER_BLOCK or size >= _SMALL_UNIT_BYTES:
        return None
    evidence: dict[str, float] = {"units in a block": most, "units": len(e.facts.units)}
    evidence["median bytes of a unit"] = size
    return make_finding("SW003", evidence, unit=block, block=block)


def largest_unit(e: Evidence) -> Finding | None:
    """Find one unit that is much larger than all others."""
    facts, held = e.facts, sorted(_held(e), key=lambda unit: -unit.full_bytes)
    if len(held) <= _NUM_OTHERS or facts.full_bytes < _TOY_BYTES:
        return None
    unit, largest, following = held[0], held[0].full_bytes, held[1].full_bytes
    share = largest / facts.full_bytes
    least = _LARGEST_IF_FELT if largest > _FELT * facts.device_bytes else _LARGEST
    if share < least or largest < _TIMES_NEXT * following:
        return None
    evidence: dict[str, float] = {"share": share, "bytes": largest}
    evidence |= {"bytes of the next": following, "threshold": _LARGEST}
    name, times = name_of_unit(unit.name), largest / following
    return make_finding("SW004", evidence, unit=unit.name, name=name, times=times)


def padding(e: Evidence) -> Finding | None:
    """Find layouts that pad a large part of the parameters."""
    facts, num_bytes = e.facts, sum(unit.padding_bytes for unit in e.facts.units)
    if not any(facts.padding_share > share and num_bytes > least for share, least in _PADDING):
        return None
    worst = max(facts.units, key=lambda unit: unit.padding_bytes)
    evidence: dict[str, float] = {"share": facts.padding_share, "bytes": num_bytes}
    evidence |= {"bytes of the worst unit": worst.padding_bytes, "threshold": _PADDING[0][0]}
    return make_finding(
        "SW006",
        evidence,
        *([Change("layout", "rows", "flat")] if worst.layout == "rows" else []),
        gain=num_bytes / e.num_shards,
        unit=worst.name,
        name=name_of_unit(worst.name),
        shards=e.num_shards,
    )


def small_buckets(e: Evidence) -> Finding | None:
    """Find a bucket that makes many reductions of gradients that would fit into a few."""
    facts, default = e.facts, DEFAULT_BUCKET_BYTES
    if facts.reduces_units_alone or facts.bucket_bytes >= default:
        return None
    now, then = (_num_buckets(e, size) for size in (facts.bucket_bytes, default))
    if now < 2 * then or now < then + 2:
        return None
    evidence = {"reductions": now, "by default": then, "bucket_bytes": facts.bucket_bytes}
    return make_finding("SW010", evidence, default_bytes=default)


def _num_buckets(e: Evidence, bucket_bytes: int) -> int:
    """Return how many reductions a backward pass starts, over all units."""
    count, held, is_open = 0, 0, False
    for unit in reversed(e.facts.units):
        held, is_open = held + unit.full_bytes, True
        if held >= bucket_bytes:
            count, held, is_open = count + 1, 0, False
    return count + is_open


def large_bucket(e: Evidence) -> Finding | None:
    """Find a bucket that takes the whole model."""
    facts, sizes = e.facts, [unit.full_bytes for unit in _held(e)]
    if len(sizes) < 3 or facts.bucket_bytes < max(facts.full_bytes, DEFAULT_BUCKET_BYTES + 1):
        return None
    evidence = {"bytes of all units": facts.full_bytes, "units": len(sizes)}
    evidence["bucket_bytes"] = facts.bucket_bytes
    gain = max(facts.full_bytes - max(sizes) - DEFAULT_BUCKET_BYTES, 0.0)
    return make_finding("SW011.bucket", evidence, gain=gain, default_bytes=DEFAULT_BUCKET_BYTES)


def large_prefetch(e: Evidence) -> Finding | None:
    """Find a prefetch budget that takes half of the model."""
    facts, sizes = e.facts, [unit.full_bytes for unit in _held(e)]
    budget = facts.prefetch_bytes or 0
    if len(sizes) < 3 or facts.stage < 3 or budget < max(facts.full_bytes / 2, 2 * max(sizes) + 1):
        return None
    ahead, change = min(budget, facts.full_bytes), Change("prefetch_bytes", budget, None)
    evidence = {"bytes of all units": facts.full_bytes, "units": len(sizes)}
    evidence |= {"prefetch_bytes": budget, "largest unit": max(sizes)}
    gain, share = ahead - max(sizes), ahead / facts.full_bytes
    return make_finding("SW011.prefetch", evidence, change, gain=gain, ahead=share)


def _held(e: Evidence) -> list[UnitFacts]:
    """Return the units that have parameters."""
    return [unit for unit in e.facts.units if unit.num_params]
