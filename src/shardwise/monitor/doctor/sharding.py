"""Rules about units, buckets and the prefetch budget: known before the first step is over."""

import re
from collections import Counter
from statistics import median

from shardwise.monitor.doctor.evidence import num_shards
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.metrics import MIB
from shardwise.monitor.record import RunFacts, RunRecord, UnitFacts
from shardwise.names import name_of_unit
from shardwise.stages import DEFAULT_BUCKET_BYTES

_WHOLE = 1.2  # slices x ranks beyond the parameters
_UNSHARDED = 0.1
_LAYERS, _MODULES = 8, 4  # parameters, and modules that hold them, of at least several layers
_TOY_BYTES = 4 * MIB  # of a model, below which the cost of its units is negligible
_UNITS_PER_BLOCK, _SMALL_UNIT_BYTES = 4, MIB
_LARGEST, _LARGEST_IF_FELT, _FELT = 0.5, 0.3, 0.05
_NUM_OTHERS, _TIMES_NEXT = 3, 3.0
_PADDING = ((0.02, MIB), (0.2, 64 << 10))  # share, bytes
_IN_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")  # "model.layers.3" of "model.layers.3.mlp"


def not_sharded(run: RunRecord) -> Finding | None:
    """Find state that is whole on several ranks at a stage that cuts it."""
    facts = run.facts
    if not facts.stage:
        return None
    copies, shards = facts.degrees.get("replicate", 1), num_shards(facts)
    outside = facts.unsharded_bytes / (facts.full_bytes + facts.unsharded_bytes or 1)
    rank_bytes = sum(unit.rank_bytes for unit in facts.units)
    padded = facts.full_bytes * (1 + facts.padding_share) or 1
    evidence = {"ranks": facts.num_ranks, "shards": shards, "copies": copies}
    if shards == 1 and copies > 1:
        evidence |= {"bytes of one rank": rank_bytes}
        gain = rank_bytes * (1 - 1 / copies)
        return make_finding("SW001.copies", evidence, gain=gain, stage=facts.stage)
    if outside > _UNSHARDED:
        evidence |= {"bytes of no unit": facts.unsharded_bytes}
        gain = facts.unsharded_bytes * (1 - 1 / shards)
        return make_finding("SW001.outside", evidence | {"share": outside}, gain=gain)
    if shards > 1 and rank_bytes * shards > _WHOLE * padded:
        evidence |= {"bytes of one rank": rank_bytes, "bytes of all": facts.full_bytes}
        return make_finding("SW001.uneven", evidence, gain=rank_bytes - padded / shards)
    return None


def one_unit(run: RunRecord) -> Finding | None:
    """Find a model that is a single unit."""
    held = [unit for unit in run.facts.units if unit.num_params]
    if len(held) != 1 or held[0].num_params < _LAYERS:
        return None
    unit = held[0]
    # The parameters of one module (nn.LSTM with all its layers) cannot be in several units.
    if unit.full_bytes < _TOY_BYTES or 0 < unit.num_modules < _MODULES:
        return None
    evidence = {"units": 1, "parameters": unit.num_params, "bytes": unit.full_bytes}
    return make_finding("SW002", evidence, unit=unit.name, name=name_of_unit(unit.name))


def too_fine(run: RunRecord) -> Finding | None:
    """Find blocks of many small units."""
    units = run.facts.units
    found = [(m.group(), u) for u in units if u.num_params and (m := _IN_BLOCK.match(u.name))]
    if not found:
        return None
    block, most = Counter(name for name, _ in found).most_common(1)[0]
    size = median(unit.full_bytes for name, unit in found if name == block)
    if most <= _UNITS_PER_BLOCK or size >= _SMALL_UNIT_BYTES:
        return None
    evidence = {"units in a block": most, "units": len(units), "median bytes of a unit": size}
    return make_finding("SW003", evidence, unit=block, block=block)


def largest_unit(run: RunRecord) -> Finding | None:
    """Find one unit that is much larger than all others."""
    facts = run.facts
    held = sorted((u for u in facts.units if u.num_params), key=lambda u: -u.full_bytes)
    if len(held) <= _NUM_OTHERS or facts.full_bytes < _TOY_BYTES:
        return None
    unit, following = held[:2]
    share = unit.full_bytes / facts.full_bytes
    is_felt = unit.full_bytes > _FELT * facts.device_bytes
    least = _LARGEST_IF_FELT if is_felt else _LARGEST
    if share < least or unit.full_bytes < _TIMES_NEXT * following.full_bytes:
        return None
    return make_finding(
        "SW004",
        {
            "share": share,
            "bytes": unit.full_bytes,
            "bytes of the next": following.full_bytes,
            "threshold": _LARGEST,
        },
        unit=unit.name,
        name=name_of_unit(unit.name),
        times=unit.full_bytes / following.full_bytes,
    )


def padding(run: RunRecord) -> Finding | None:
    """Find layouts that pad a large part of the parameters."""
    facts = run.facts
    num_bytes = sum(unit.padding_bytes for unit in facts.units)
    if not any(facts.padding_share > share and num_bytes > least for share, least in _PADDING):
        return None
    worst: UnitFacts = max(facts.units, key=lambda unit: unit.padding_bytes)
    return make_finding(
        "SW006",
        {
            "share": facts.padding_share,
            "bytes": num_bytes,
            "bytes of the worst unit": worst.padding_bytes,
            "threshold": _PADDING[0][0],
        },
        *([Change("layout", "rows", "flat")] if worst.layout == "rows" else []),
        gain=num_bytes / num_shards(facts),
        unit=worst.name,
        name=name_of_unit(worst.name),
        shards=num_shards(facts),
    )


def small_buckets(run: RunRecord) -> Finding | None:
    """Find a bucket that makes many reductions of gradients that would fit into a few."""
    facts = run.facts
    if facts.reduces_units_alone or facts.bucket_bytes >= DEFAULT_BUCKET_BYTES:
        return None
    now, then = (_num_buckets(facts, size) for size in (facts.bucket_bytes, DEFAULT_BUCKET_BYTES))
    if now < 2 * then or now < then + 2:
        return None
    evidence = {"reductions": now, "by default": then, "bucket_bytes": facts.bucket_bytes}
    return make_finding("SW010", evidence, default_bytes=DEFAULT_BUCKET_BYTES)


def _num_buckets(facts: RunFacts, bucket_bytes: int) -> int:
    """Return how many reductions a backward pass starts, over all units."""
    count, held, is_open = 0, 0, False
    for unit in reversed(facts.units):
        held, is_open = held + unit.full_bytes, True
        if held >= bucket_bytes:
            count, held, is_open = count + 1, 0, False
    return count + is_open


def large_bucket(run: RunRecord) -> Finding | None:
    """Find a bucket that takes the whole model."""
    facts, sizes = run.facts, _sizes(run.facts)
    if len(sizes) < 3 or facts.bucket_bytes < max(facts.full_bytes, DEFAULT_BUCKET_BYTES + 1):
        return None
    return make_finding(
        "SW011.bucket",
        {
            "bytes of all units": facts.full_bytes,
            "units": len(sizes),
            "bucket_bytes": facts.bucket_bytes,
        },
        gain=max(facts.full_bytes - max(sizes) - DEFAULT_BUCKET_BYTES, 0.0),
        default_bytes=DEFAULT_BUCKET_BYTES,
    )


def large_prefetch(run: RunRecord) -> Finding | None:
    """Find a prefetch budget that takes half of the model."""
    facts, sizes = run.facts, _sizes(run.facts)
    budget = facts.prefetch_bytes or 0
    if len(sizes) < 3 or facts.stage < 3 or budget < max(facts.full_bytes / 2, 2 * max(sizes) + 1):
        return None
    ahead = min(budget, facts.full_bytes)
    return make_finding(
        "SW011.prefetch",
        {
            "bytes of all units": facts.full_bytes,
            "units": len(sizes),
            "prefetch_bytes": budget,
            "largest unit": max(sizes),
        },
        Change("prefetch_bytes", budget, None),
        gain=ahead - max(sizes),
        ahead=ahead / facts.full_bytes,
    )


def _sizes(facts: RunFacts) -> list[int]:
    return [unit.full_bytes for unit in facts.units if unit.num_params]
