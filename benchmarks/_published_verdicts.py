"""Verdicts against published ones: what fitted, what ran out of memory, and the largest batch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from _published_memory import GIB, Memory, Setup, memory_of, setup_of
from _published_rows import Row, Unmodelled

from shardwise.errors import ConfigError
from shardwise.plan.machine.catalogue import find_accelerator
from shardwise.plan.margins import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION, Range

_GDDR_SHARE = 0.985  # of the nominal memory that a driver leaves; see accelerators.toml


@dataclass
class Verdicts:
    """Counts of agreement; ``lines`` are for people."""

    fits: list[tuple[str, bool]] = field(default_factory=list)
    oom: list[tuple[str, bool]] = field(default_factory=list)
    next_batch: list[tuple[str, bool]] = field(default_factory=list)
    certain: dict[str, str] = field(default_factory=dict)  # of those beyond memory, by row

    @property
    def lines(self) -> list[str]:
        """Return the rows whose verdict is wrong."""
        wrong = [f"{i:6} fits as published, predicted not to" for i, ok in self.fits if not ok]
        wrong += [f"{i:6} OOM as published, predicted to fit" for i, ok in self.oom if not ok]
        wrong += [f"{i:6} next batch OOM, predicted to fit" for i, ok in self.next_batch if not ok]
        false = [i for i, verdict in self.certain.items() if verdict == "fits"]
        wrong += [f"{i:6} beyond memory, certain to fit by the interval" for i in false]
        return wrong

    def figures(self) -> dict[str, float | int]:
        """Return counts and shares."""
        found: dict[str, float | int] = {}
        for name, told in (
            ("rows that ran", self.fits),
            ("rows that ran out of memory", self.oom),
            ("batches beyond the largest", self.next_batch),
        ):
            right = sum(ok for _, ok in told)
            found[name] = len(told)
            found[f"{name}: predicted so"] = right
            found[f"{name}: share wrong"] = round(1 - right / len(told), 4) if told else 0.0
        for verdict in ("fits", "tight", "will not fit"):
            found[f"beyond memory, by interval: {verdict}"] = list(self.certain.values()).count(
                verdict
            )
        return found


def capacity_bytes(row: Row) -> float:
    """Return what the driver reports for the row's card.

    **Raises** Unmodelled where neither the card nor its size is known.
    """
    name = re.sub(r"\(.*?\)|-\d+W", "", row.cell("gpu")).strip()
    try:
        return find_accelerator(name).memory_bytes
    except ConfigError:
        size = row.number("gpu_mem_gb")
        if size is None:
            raise Unmodelled("card not known") from None
        return size * GIB * _GDDR_SHARE


def device_bytes(setup: Setup, memory: Memory) -> Range:
    """Return what the driver sees: tensors, what the allocator keeps, context, communicators."""
    groups = sum(setup.row.count(name, 1) > 1 for name in ("tp", "pp", "cp"))
    groups += setup.row.data_parallel > 1

    def total(end: str) -> float:
        kept = 1 + getattr(FRAGMENTATION, end)
        beside = getattr(CONTEXT_BYTES, end) + groups * getattr(COMMUNICATOR_BYTES, end)
        return memory.total * kept + float(beside)

    return Range(total("low"), total("expected"), total("high"))


def fits(row: Row) -> bool:
    """Predict whether a row fits its card, by what is to be expected.

    **Raises** Unmodelled with the reason.
    """
    setup = setup_of(row)
    return device_bytes(setup, memory_of(setup)).expected <= capacity_bytes(row)


def verdict(row: Row) -> str:
    """Return the planner's verdict: "fits" and "will not fit" are certain, "tight" is between.

    **Raises** Unmodelled with the reason.
    """
    setup = setup_of(row)
    needs, capacity = device_bytes(setup, memory_of(setup)), capacity_bytes(row)
    if needs.low > capacity:
        return "will not fit"
    # Whatever sequence length is assumed where none is told, the true one may be longer.
    is_told = row.number("seq_len") is not None
    return "fits" if needs.high <= capacity and is_told else "tight"


def with_batch(row: Row, batch: int) -> Row:
    """Return the row with another micro-batch."""
    return replace(row, text={**row.text, "micro_batch": str(batch), "global_batch": ""})


def check_verdicts(row: Row, verdicts: Verdicts) -> None:
    """Compare a row's verdicts with the prediction; nothing for a row that tells none."""
    kind = row.cell("mem_kind").lower()
    out = row.says("mem_value", "oom") and "host oom" not in kind
    if "component" in kind or "host oom" in kind:
        return
    if out:
        verdicts.oom.append((row.id, not fits(row)))
        verdicts.certain[row.id] = verdict(row)
        return
    at = re.search(r"fits at (\d+), oom at (\d+)", kind)
    if at:
        verdicts.fits.append((row.id, fits(with_batch(row, int(at[1])))))
        verdicts.next_batch.append((row.id, not fits(with_batch(row, int(at[2])))))
        verdicts.certain[row.id] = verdict(with_batch(row, int(at[2])))
        return
    ran = kind.startswith(("fits", "max")) or row.number("mem_value") is not None
    if not ran or "model" in kind:
        return
    if kind.startswith("fits") and not row.cell("act_ckpt"):
        raise Unmodelled("fits, but checkpointing is not told")
    verdicts.fits.append((row.id, fits(row)))
    if "next is oom" in kind:
        larger = with_batch(row, row.count("micro_batch") + 1)
        verdicts.next_batch.append((row.id, not fits(larger)))
        verdicts.certain[row.id] = verdict(larger)
