"""What a published row says was switched on, as the planner's mechanisms; and what nobody knows.

Cells are read by phrases, so rewriting one with the same meaning changes nothing: case, dashes,
comments in parentheses, order, abbreviations. A flag is None where the row does not tell; what a
system does by default is data (`data/systems.toml`) and is put in elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from _published_rows import Row
from _published_words import Lexicon, Said, apart, plain, table

from shardwise.plan.model.activations import Checkpointing, LossKind

Policy = Literal["mixed", "mixed_fp32_grads", "fp32_master", "pure", "bf16_master", "fp32"]
Adapters = Literal["none", "lora", "qlora"]

_CHECKPOINTING, _OFFLOAD, _MECHANISMS = map(
    Lexicon.named, ("checkpointing", "offload", "mechanisms")
)
_SHARDING: list[tuple[int, str]] = table()["sharding"]["stages"]


@dataclass(frozen=True)
class Away:
    """Shares of what is kept off the device, 0 .. 1; ``untold``: offload, but not of what."""

    params: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    untold: bool = False

    @property
    def any(self) -> bool:
        """Tell whether anything is away."""
        return self.untold or max(self.params, self.grads, self.optimizer, self.activations) > 0


@dataclass(frozen=True)
class Flags:
    """A row's mechanisms; None or 0 where it does not tell. ``unknown``: words nothing explains."""

    stage: int | None
    shard_group: int | None
    checkpointing: Checkpointing | None
    partitioned: bool
    sequence_parallel: bool
    away: Away
    policy: Policy | None
    dtype: Literal["float32", "float16", "bfloat16"]
    float8: bool
    optimizer: str  # "", "8bit", "4bit", "sgd", "one_moment"
    paged: bool
    fused_optimizer: bool
    step_in_backward: bool
    adapters: Adapters
    adapter_rank: int | None
    compiled: bool | None
    loss: LossKind | None
    rung: str
    full_finetune: bool
    unknown: tuple[str, ...]


# torchtune's README adds one thing after the other; a row has all that come before its own.
LADDER = (
    "packed", "compile", "chunked_loss", "checkpointing", "in_backward", "activation_offload",
    "8bit", "lora", "qlora",
)  # fmt: skip


def flags_of(row: Row) -> Flags:
    """Read a row's cells. Nothing is refused; see ``unknown``."""
    said, rung = _mechanisms(row)
    checkpointing, others, unknown = checkpointing_of(row.cell("act_ckpt"))
    if checkpointing is None and ("checkpointing" in said or rung):
        checkpointing = "full" if "checkpointing" in said else "none"
    sharding = plain(f"{row.cell('sharding')}")
    if checkpointing is None:
        told = [s for s in _MECHANISMS.read(sharding)[0] if s.says == "checkpointing"]
        checkpointing = ("full" if told[0].holds else "none") if told else None
    away, more = away_of(row)
    if "activation_offload" in said:
        away = Away(away.params, away.grads, away.optimizer, 1.0, away.untold)
    policy, dtype = precision_of(row.cell("precision"))
    compiled = _yes_or_no(row.cell("compile"))
    if compiled is None and ("compile" in said or row.says("source", "older version")):
        compiled = True  # torchtitan's page of mid-2024 had a fused norm in place of the eager one
    return Flags(
        stage=stage_of(sharding) if sharding else None,
        shard_group=group_of(sharding),
        checkpointing=checkpointing,
        partitioned="partitioned" in others,
        sequence_parallel="sequence_parallel" in others,
        away=away,
        policy=policy,
        dtype=dtype,
        float8=bool(re.search(r"fp8|float8|mxfp8|nvfp4", plain(row.cell("precision")))),
        optimizer=next((o for o in ("8bit", "4bit", "sgd", "one_moment") if o in said), ""),
        paged="paged" in said,
        fused_optimizer="fused_adam" in said,
        step_in_backward="in_backward" in said,
        adapters="qlora" if "qlora" in said else "lora" if "lora" in said else "none",
        adapter_rank=_rank(row),
        compiled=compiled,
        loss=_loss(said, bool(compiled)),
        rung=rung,
        full_finetune="full_finetune" in said or "full finetune" in plain(row.cell("system")),
        unknown=(*unknown, *more),
    )


def checkpointing_of(cell: str) -> tuple[Checkpointing | None, set[str], tuple[str, ...]]:
    """Read what is recomputed; None: not told. Other things that the cell says come second.

    Modules that are recomputed alone (norms, activations) count as what is left of a fused layer:
    less than Megatron's selective, so as that where nothing else is told. An empty list is none.
    """
    text = plain(cell)
    if not text:
        return None, set(), ()
    if re.search(r"\[\s*\]", text):
        return "none", set(), ()
    main, comment = apart(text)
    said, unknown = _CHECKPOINTING.read(main)
    finer = _CHECKPOINTING.read(comment)[0]
    others = {s.says for s in said if s.holds}
    ways = [s for s in said if s.says in ("per_op", "selective", "some_layers", "full", "none")]
    first = min(ways, key=lambda s: _place(main, s), default=None)
    if first is None:
        return ("selective" if "module" in others else None), others, unknown
    if not first.holds or first.says == "none":
        return "none", others, unknown
    selective = next((s for s in ways if s.says in ("selective", "per_op") and s.holds), None)
    if selective is not None and first.says != "full":
        # A comment may say which: "selective (op)".
        per_op = any(s.says == "per_op" and s.holds for s in [*ways, *finer])
        return ("per_op" if per_op else "selective"), others, unknown
    known: dict[str, Checkpointing] = {"some_layers": "selective", "per_op": "per_op"}
    return known.get(first.says, "full"), others, unknown


def _place(text: str, said: Said) -> int:
    at = text.find(said.words.strip())
    return at if at >= 0 else len(text)


def away_of(row: Row) -> tuple[Away, tuple[str, ...]]:
    """Read what is off the device, from the offload cell or else from sharding and system."""
    cell = plain(row.cell("offload"))
    main, _ = apart(cell)
    said, unknown = _OFFLOAD.read(main)
    if not cell:
        text = " , ".join(plain(row.cell(name)) for name in ("sharding", "system"))
        if not re.search(r"offload|infinity", text) or re.search(r"\bno offload", text):
            return Away(), ()
        said, unknown = [Said("offload", True, "offload")], ()
    names = {s.says for s in said if s.holds}
    share = re.search(r"(\d+(?:\.\d+)?) ?% of", main)
    if "nothing" in names and not names - {"nothing", "kernel"}:
        return Away(), unknown
    parts = names & {"params", "grads", "optimizer", "activations"}
    if share:
        return Away(optimizer=min(1.0, float(share[1]) / 100)), unknown
    whole = "all" in names or bool(re.search(r"\bfull|\ball\b", main))
    if not names & {"offload", "all"} and not parts:
        return Away(), unknown
    if whole or not parts:
        return _whole(row, main, whole), unknown
    stays = 0.0 if "params" not in parts else 1.0
    grads = 1.0 if parts & {"grads", "params"} else 0.0
    states = 1.0 if parts & {"optimizer", "params"} else 0.0
    return Away(stays, grads, states, float("activations" in parts)), unknown


def _whole(row: Row, main: str, whole: bool) -> Away:
    """Return what "CPU offload" means: all under stage 3, what the step needs under stage 1 or 2.

    ZeRO-Offload (arXiv:2101.06840, section 3) keeps 16-bit parameters on the device.
    """
    sharding = f"{row.cell('sharding')} {row.cell('system')} {main}"
    stage = stage_of(plain(sharding))
    if whole or stage == 3:
        return Away(1.0, 1.0, 1.0)
    return Away(0.0, 1.0, 1.0, untold=stage is None)


def stage_of(text: str) -> int | None:
    """Return the ZeRO stage that a plain text means; None where it says nothing of one."""
    if re.search(r"stage not (?:stated|told|given|known)", text):
        return None
    for stage, pattern in _SHARDING:
        if re.search(rf"\b(?:{pattern})\b", text):
            return stage
    return 3 if re.search(r"\bzero\b", text) else None


def group_of(text: str) -> int | None:
    """Return the ranks of a shard group, where a plain text tells them."""
    found = re.search(r"\b(?:within|group(?: of)?|groups of) (\d+)", text)
    found = found or re.search(r"\bfsdp (\d\d|[4-9]) within", text)
    if found:
        return int(found[1])
    return 8 if re.search(r"\bhsdp\b|hybrid ?shard", text) else None


def precision_of(cell: str) -> tuple[Policy | None, Literal["float32", "float16", "bfloat16"]]:
    """Read which copies of a parameter there are, and in which dtype layers compute."""
    text = plain(cell)
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    if re.match(r"(?:full |pure )?(?:fp32|float32|tf32|single)\b", text):
        return "fp32", "float32"
    if re.fullmatch(r"(?:amp |mixed )?(?:fp16|float16|half)(?: mixed| amp)?", text):
        dtype = "float16"
    if re.search(r"(?:bf16|bfloat16) master", text):
        return "bf16_master", dtype
    if re.search(r"(?:full|pure) (?:bf16|bfloat16)|(?:bf16|bfloat16) true|bf16 only", text):
        return "pure", dtype
    if re.search(r"fp32 (?:grad|accum)", text):
        return "mixed_fp32_grads", dtype
    if dtype == "float16":
        return "mixed", dtype
    if re.search(r"fp32 (?:master|states?|weights|params)", text):
        return "mixed", dtype
    return None, dtype


def _mechanisms(row: Row) -> tuple[set[str], str]:
    """Return what system and notes say runs, and the rung of a ladder if the row is on one."""
    notes = plain(row.cell("notes"))
    if "ladder" in notes:
        at = notes.rfind("ladder")
        own = [s.says for s in _MECHANISMS.read(notes[at:])[0] if s.says in LADDER]
        rung = max(own, key=LADDER.index, default="")
        below = LADDER[: LADDER.index(rung) + 1] if rung else ()
        adapted = rung in ("lora", "qlora")
        # Adapters take the place of what makes the optimizer small.
        return {b for b in below if not (adapted and b in ("in_backward", "8bit"))}, rung
    told = {s.says for s in _MECHANISMS.read(notes)[0] if s.holds}
    model = {s.says for s in _MECHANISMS.read(plain(row.cell("model")))[0] if s.holds}
    told |= model & {"lora", "qlora"}
    named = {s.says for s in _MECHANISMS.read(plain(row.cell("system")))[0] if s.holds}
    if told & {"lora", "qlora"}:  # these are of the row, a system may be named after one of them
        named -= {"lora", "qlora"}
    return told | named, ""


def _yes_or_no(cell: str) -> bool | None:
    text = apart(plain(cell))[0]
    if not text:
        return None
    return not re.match(r"(?:no|none|off|false|0|eager|without|not|disabled)\b", text)


def _rank(row: Row) -> int | None:
    text = plain(f"{row.cell('notes')} , {row.cell('system')}")
    found = re.search(r"(?:lora )?(?:rank|\br) ?[:=]? ?(\d+)\b", text) if "lora" in text else None
    return int(found[1]) if found and 1 <= int(found[1]) <= 4096 else None


def _loss(said: set[str], compiled: bool) -> LossKind | None:
    if "fused_loss" in said:
        return "fused"
    if "chunked_loss" in said:
        return "compiled" if compiled or "compile" in said else "chunked"
    return "compiled" if "compiled_loss" in said else None
