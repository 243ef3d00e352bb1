"""How the model is cut: known from its facts, before the first step is over."""

import re
from collections import Counter
from statistics import median

from shardwise.monitor.doctor.evidence import finding, num_shards
from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.metrics import MIB
from shardwise.monitor.record import RunRecord, UnitFacts
from shardwise.names import name_of_unit
from shardwise.quantities import format_bytes

_WHOLE = 1.2  # slices x ranks beyond the parameters
_UNSHARDED = 0.1
_LAYERS, _MODULES = 8, 4  # parameters, and modules that hold them, that surely are several layers
_TOY_BYTES = 4 * MIB  # of a model, below which its units cost nothing that could be felt
_UNITS_PER_BLOCK, _SMALL_UNIT_BYTES = 4, MIB
_LARGEST, _LARGEST_IF_FELT, _FELT = 0.5, 0.3, 0.05
_NUM_OTHERS, _TIMES_NEXT = 3, 3.0
_PADDING = ((0.02, MIB), (0.2, 64 << 10))  # share, bytes
_IN_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")  # "model.layers.3" of "model.layers.3.mlp"


def not_sharded(run: RunRecord) -> list[Finding]:
    """Find state that is whole on several ranks, though a stage was asked for."""
    facts = run.facts
    if not facts.stage or facts.num_ranks == 1:
        return []
    copies, shards = facts.degrees.get("replicate", 1), num_shards(facts)
    outside = facts.unsharded_bytes / (facts.full_bytes + facts.unsharded_bytes or 1)
    rank_bytes = sum(unit.rank_bytes for unit in facts.units)
    padded = facts.full_bytes * (1 + facts.padding_share) or 1
    evidence = {"ranks": facts.num_ranks, "shards": shards, "copies": copies}
    if shards == 1 and copies > 1:
        return [
            finding(
                run,
                "SW001",
                f"stage {facts.stage} over {copies} copies and one shard: nothing is cut",
                evidence | {"bytes of one rank": rank_bytes},
                "Parameters are cut over the shard axis, and that has one rank. All ranks are on "
                "the replicate axis, which holds copies.",
                [Change("dp_shard", 1, copies), Change("dp_replicate", copies, 1)],
                Gain(rank_bytes * (1 - 1 / copies), "bytes", "the units' slices over all ranks"),
            )
        ]
    if outside > _UNSHARDED:
        return [
            finding(
                run,
                "SW001",
                f"{format_bytes(facts.unsharded_bytes)} of trained parameters belong to no unit "
                f"({outside:.0%}), so every rank has them whole",
                evidence | {"bytes of no unit": facts.unsharded_bytes, "share": outside},
                "The optimizer holds them beside those of the sharded model, and nobody reduces "
                "their gradients.",
                [Change("shard(model)", "a part of the model", "the whole model")],
                Gain(facts.unsharded_bytes * (1 - 1 / shards), "bytes", "their bytes"),
            )
        ]
    if shards > 1 and rank_bytes * shards > _WHOLE * padded:
        return [
            finding(
                run,
                "SW001",
                f"one rank holds {format_bytes(rank_bytes)} of {format_bytes(facts.full_bytes)}, "
                f"more than its share over {shards} ranks",
                evidence | {"bytes of one rank": rank_bytes, "bytes of all": facts.full_bytes},
                "Slices of all ranks together exceed the parameters.",
                gain=Gain(rank_bytes - padded / shards, "bytes", "an even cut"),
            )
        ]
    return []


def one_unit(run: RunRecord) -> list[Finding]:
    """Find a model that is a single unit."""
    facts = run.facts
    held = [unit for unit in facts.units if unit.num_params]
    if facts.num_ranks == 1 or len(held) != 1 or held[0].num_params < _LAYERS:
        return []
    unit = held[0]
    # What is in one module (nn.LSTM with all its layers) cannot be in several units.
    if unit.full_bytes < _TOY_BYTES or 0 < unit.num_modules < _MODULES:
        return []
    return [
        finding(
            run,
            "SW002",
            f"all {unit.num_params} parameters are one unit of {format_bytes(unit.full_bytes)}",
            {"units": 1, "parameters": unit.num_params, "bytes": unit.full_bytes},
            "Nothing is gathered or reduced while something else computes, and the whole model is "
            "full at once.",
            [Change("units", name_of_unit(unit.name), "the repeated blocks")],
            unit=unit.name,
        )
    ]


def too_fine(run: RunRecord) -> list[Finding]:
    """Find blocks of many small units."""
    facts = run.facts
    if facts.num_ranks == 1:
        return []
    found = [(m.group(), u) for u in facts.units if (m := _IN_BLOCK.match(u.name))]
    counts = Counter(block for block, unit in found if unit.num_params)
    if not counts:
        return []
    block, most = counts.most_common(1)[0]
    sizes = [unit.full_bytes for name, unit in found if name == block and unit.num_params]
    if most <= _UNITS_PER_BLOCK or median(sizes) >= _SMALL_UNIT_BYTES:
        return []
    return [
        finding(
            run,
            "SW003",
            f"{most} units in '{block}', half of them below {format_bytes(median(sizes))}",
            {
                "units in a block": most,
                "units": len(facts.units),
                "median bytes of a unit": median(sizes),
            },
            "Each is gathered and reduced by itself, which costs its latency rather than its "
            "bytes.",
            [Change("units", f"{most} in each block", "one for each block")],
            unit=block,
        )
    ]


def largest_unit(run: RunRecord) -> list[Finding]:
    """Find one unit that outweighs all others."""
    facts = run.facts
    held = sorted((u for u in facts.units if u.num_params), key=lambda u: -u.full_bytes)
    if facts.num_ranks == 1 or len(held) <= _NUM_OTHERS:
        return []
    unit, following = held[:2]
    share = unit.full_bytes / facts.full_bytes
    is_felt = unit.full_bytes > _FELT * facts.device_bytes
    if (
        share < (_LARGEST_IF_FELT if is_felt else _LARGEST)
        or unit.full_bytes < _TIMES_NEXT * following.full_bytes
        or facts.full_bytes < _TOY_BYTES
    ):
        return []
    name = name_of_unit(unit.name)
    return [
        finding(
            run,
            "SW004",
            f"unit '{name}' has {share:.0%} of all parameters ({format_bytes(unit.full_bytes)}), "
            f"{unit.full_bytes / following.full_bytes:.1f} times the next one",
            {
                "share": share,
                "bytes": unit.full_bytes,
                "bytes of the next": following.full_bytes,
                "threshold": _LARGEST,
            },
            "Its full parameters and gradients are held beside all else, and while it is gathered "
            "there is nothing to compute.",
            [Change("units", name, "its parts, embedding and head apart")],
            unit=unit.name,
        )
    ]


def padding(run: RunRecord) -> list[Finding]:
    """Find layouts that fill up a good part of what they hold."""
    facts = run.facts
    num_bytes = sum(unit.padding_bytes for unit in facts.units)
    if not any(facts.padding_share > share and num_bytes > least for share, least in _PADDING):
        return []
    worst: UnitFacts = max(facts.units, key=lambda unit: unit.padding_bytes)
    changes = [Change("layout", "rows", "flat")] if worst.layout == "rows" else []
    return [
        finding(
            run,
            "SW006",
            f"{format_bytes(num_bytes)} of padding, {facts.padding_share:.1%} of the parameters; "
            f"most in '{name_of_unit(worst.name)}'",
            {
                "share": facts.padding_share,
                "bytes": num_bytes,
                "bytes of the worst unit": worst.padding_bytes,
                "threshold": _PADDING[0][0],
            },
            f"Rows that do not divide by {num_shards(facts)} ranks are filled up, in gradients "
            "and in the optimizer's state too.",
            changes,
            Gain(num_bytes / num_shards(facts), "bytes", "the parameters' padding on each rank"),
            unit=worst.name,
        )
    ]
