"""Cells of published runs: read a row of a table into numbers, mechanisms and a model's shape.

Cells are written by people: "selective (recipe default)", "Selective AC", "w/o act ckpt". A cell is
normalized first (case, dashes, arrows, signs), the text in parentheses is split off as a comment,
and the phrases of `data/phrases.toml` are taken out one by one. Words that are left over and mean
something are reported. A cell that cannot be read gives None, never an error.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
import unicodedata
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.homes import Offload
from shardwise.plan.candidate import Checkpointing
from shardwise.plan.model.presets import find_preset, preset_names
from shardwise.plan.model.shapes import DecoderShape, Experts, Latent, gpt_shape, llama_shape

_DATA = Path(__file__).parent / "data"
TABLES = (_DATA / "published_runs.csv", _DATA / "more_runs.csv")
# Runs of pages that no constant, default or phrase was chosen by. Fit nothing to them.
UNSEEN = _DATA / "unseen_runs.csv"

# Larger figures are typing errors, not sizes of a run.
_LARGEST = {"tp": 1024, "pp": 1024, "cp": 1024, "micro_batch": 1 << 16, "n_gpus": 1 << 20}
_LARGEST_ARCH = {"L": 2000, "h": 1 << 17, "f": 1 << 20, "a": 4096, "kv": 4096, "V": 1 << 24}


class Unmodelled(Exception):
    """The reason why a row is not predicted, in words that rows of one kind share."""


@cache
def read_data(name: str) -> dict[str, Any]:
    """Read a TOML file of `data/`."""
    return tomllib.loads((_DATA / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """One published run; ``text`` has every cell as it is printed."""

    text: dict[str, str]

    @property
    def id(self) -> str:
        return self.text.get("id", "") or "?"

    def cell(self, name: str) -> str:
        return self.text.get(name, "")

    def number(self, name: str) -> float | None:
        """Return the first number of a cell."""
        found = re.search(r"\d+(?:\.\d+)?", self.cell(name).replace(",", ""))
        return float(found[0]) if found else None

    def count(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number. **Raises** Unmodelled if it is missing or too large."""
        value = self.number(name)
        if value is not None and 1 <= value <= _LARGEST.get(name, 1 << 22):
            return int(value)
        if value is not None and value > 1:
            raise Unmodelled(f"{name} out of range")
        degree = re.search(rf"\b{name}(\d+)", self.cell("sharding").lower())  # ZeRO-1(dp2)+tp2+pp4
        if degree and len(name) == 2 and 1 <= int(degree[1]) <= 1024:
            return int(degree[1])
        if default is None:
            raise Unmodelled(f"no {name} given")
        return default

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one copy of the model's layers: tp x pp x cp."""
        return math.prod(self.count(name, 1) for name in ("tp", "pp", "cp"))

    @property
    def ranks(self) -> int:
        """Number of GPUs: as given, or the product of the degrees."""
        return self.count("n_gpus", self.count("dp", 1) * self.model_ranks)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks: as given, or the ranks over the other degrees."""
        return self.count("dp", max(1, self.ranks // self.model_ranks))

    def says(self, name: str, *words: str) -> bool:
        """Tell whether a cell has one of the words, in any case."""
        return any(word in self.cell(name).lower() for word in words)


def read_rows(*paths: Path) -> list[Row]:
    """Read tables, by default `TABLES`; columns that are missing count as empty."""
    found = []
    for path in paths or TABLES:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            found += [
                Row({str(k): str(v or "").strip() for k, v in line.items() if k is not None})
                for line in csv.DictReader(lines)
            ]
    return found


# -- phrases
_NEGATION = r"(?:no|not|non|without|never|disable|disabled|skip)"
_OFF = r"(?:\s*[:=]\s*(?:off|no|none|false|0|disabled)\b|\s+(?:off|disabled|false)\b)"
_PARENTHESES = re.compile(r"\(([^()]*)\)|\[([^][]*\w[^][]*)\]")
_SPELLINGS = (
    ("[\u2010-\u2015\u2212]", "-"),
    (r"\s*(?:->|=>|→|⇒)\s*", " to "),
    (r"\bw/\s?o\b|\bwithout\b", " without "),
    (r"\bw/|\bwith\b", " "),
    (r"(?<=\w)[-_](?=\w)", " "),
    (r"\s*(?:[,;|&]|\band\b|(?<![\d.])\+|\+(?!\d))\s*", " , "),
    (r"\s+", " "),
)


def normalized(text: str) -> str:
    """Return a cell in one spelling: lower case, dashes as spaces, arrows as "to", joins as commas.

    ``FULL_SHARD`` and ``full-shard`` become one, and so do ``A + B``, ``A & B`` and ``A and B``.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    for pattern, by in _SPELLINGS:
        text = re.sub(pattern, by, text)
    return text.strip(" ,.")


def split_comment(text: str) -> tuple[str, str]:
    """Split a normalized text into the part outside of parentheses and the part inside.

    If nothing is outside, the part inside is the text.
    """
    inside = " , ".join(a or b for a, b in _PARENTHESES.findall(text))
    outside = _PARENTHESES.sub(" ", text).strip(" ,")
    return (outside, inside) if outside else (inside, "")


class Phrase(NamedTuple):
    """One phrase of a text: its meaning, whether it is affirmed, and the words that matched."""

    meaning: str
    holds: bool
    words: str


@cache
def _patterns(name: str) -> tuple[list[tuple[re.Pattern[str], str]], frozenset[str]]:
    table = read_data("phrases")
    own = table[name]
    found = []
    for pattern, meaning in own["phrases"]:
        whole = pattern.replace("{CHECKPOINTS}", table["checkpoints"])
        regex = rf"(?P<no>\b{_NEGATION}\s+)?\b(?:{whole})\b(?P<off>{_OFF})?"
        found.append((re.compile(regex), meaning))
    return found, frozenset(f"{table['fillers']} {own['fillers']}".split())


def find_phrases(name: str, text: str) -> tuple[list[Phrase], tuple[str, ...]]:
    """Return the phrases of a normalized text, and the words in no phrase and not among fillers.

    ``name`` is a table of `data/phrases.toml`; each word counts once, for the first phrase.
    """
    patterns, fillers = _patterns(name)
    found = []
    for pattern, meaning in patterns:
        while match := pattern.search(text):
            found.append(Phrase(meaning, not (match["no"] or match["off"]), match[0]))
            text = f"{text[: match.start()]} , {text[match.end() :]}"
    words = re.findall(r"[a-z][a-z0-9.]*", text)
    return found, tuple(word for word in words if word not in fillers)


# -- mechanisms
@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms that a row names.

    ``candidate`` has keys of a `Candidate`, only those that the row gives. ``policy`` names the
    copies of a parameter ("": not given), ``unknown`` are the words that no phrase explains.
    """

    candidate: dict[str, Any]
    shard_group: int | None
    policy: str
    dtype: str
    float8: bool
    has_adapters: bool
    full_finetune: bool
    steps_otherwise: bool  # in backward, or with moments that the driver pages out
    unknown: tuple[str, ...]


_OPTIMIZERS = {"8bit": "adamw_8bit", "4bit": "adamw_4bit", "sgd": "sgd", "one_moment": "lion"}


def read_mechanisms(row: Row) -> Mechanisms:
    """Read a row's mechanisms. Nothing is refused; see ``unknown``."""
    found, rung = _named(row)
    sharding, precision = (normalized(row.cell(name)) for name in ("sharding", "precision"))
    checkpointing, unknown = read_checkpointing(row.cell("act_ckpt"))
    offload, more = read_offload(row)
    if checkpointing is None:
        phrases = find_phrases("mechanisms", sharding)[0]
        holds = [p.holds for p in phrases if p.meaning == "checkpointing"]
        if "checkpointing" in found or rung or holds:
            is_full = "checkpointing" in found or (not rung and holds[0])
            checkpointing = "full" if is_full else "none"
    compiled = True if "compile" in found else None
    if text := split_comment(normalized(row.cell("compile")))[0]:
        compiled = not re.match(r"(?:no|none|off|false|0|eager|without|not|disabled)\b", text)
    loss = "compiled" if "compiled_loss" in found else None
    if "chunked_loss" in found:
        loss = "compiled" if compiled or "compile" in found else "chunked"
    given = {
        "stage": read_stage(sharding) if sharding else None,
        "activation_checkpointing": checkpointing,
        "kernels": None if compiled is None else "compiled" if compiled else "eager",
        "loss": "fused" if "fused_loss" in found else loss,
        "optimizer": next((ours for o, ours in _OPTIMIZERS.items() if o in found), None),
        "offload": replace(offload, activations="cpu")
        if "activation_offload" in found
        else offload,
    }
    policies = read_data("phrases")["precision"]["policies"]
    policy, dtype = next((p[1:] for p in policies if re.search(p[0], precision)), ("", "bfloat16"))
    return Mechanisms(
        candidate={name: value for name, value in given.items() if value is not None},
        shard_group=read_group(sharding),
        policy=policy,
        dtype=dtype,
        float8=bool(re.search(r"fp8|float8|mxfp8|nvfp4", precision)),
        has_adapters=bool(found & {"lora", "qlora"}),
        full_finetune="full_finetune" in found or "full finetune" in normalized(row.cell("system")),
        steps_otherwise=bool(found & {"in_backward", "paged"}),
        unknown=(*unknown, *more),
    )


def _named(row: Row) -> tuple[set[str], str]:
    """Return the mechanisms of system, model and notes, and the rung of the ladder, if any."""

    def held(name: str) -> set[str]:
        phrases = find_phrases("mechanisms", normalized(row.cell(name)))[0]
        return {p.meaning for p in phrases if p.holds}

    notes, adapters = normalized(row.cell("notes")), {"lora", "qlora"}
    if "ladder" in notes:
        ladder = read_data("phrases")["ladder"]["rungs"]
        phrases = find_phrases("mechanisms", notes[notes.rfind("ladder") :])[0]
        rung = max(
            (p.meaning for p in phrases if p.meaning in ladder), key=ladder.index, default=""
        )
        below = set(ladder[: ladder.index(rung) + 1] if rung else ())
        # Adapters replace the rungs that make the optimizer small.
        return below - ({"in_backward", "8bit"} if rung in adapters else set()), rung
    found, named = held("notes") | (held("model") & adapters), held("system")
    if found & adapters:  # these are of the row; a system may be named after one of them
        named -= adapters
    return found | named, ""


def read_checkpointing(cell: str) -> tuple[Checkpointing | None, tuple[str, ...]]:
    """Return the kind of checkpointing, None if the cell does not say; unknown words come second.

    Modules that are recomputed alone (norms, activations) count as selective.
    """
    text = normalized(cell)
    if not text or re.search(r"\[\s*\]", text):
        return ("none" if text else None), ()
    main, comment = split_comment(text)
    phrases, unknown = find_phrases("checkpointing", main)
    kinds = ("per_op", "selective", "some_layers", "full", "none")
    ways = [p for p in phrases if p.meaning in kinds]
    first = min(ways, key=lambda p: main.find(p.words.strip()) % (len(main) + 1), default=None)
    if first is None:
        has_modules = any(p.meaning == "module" and p.holds for p in phrases)
        return ("selective" if has_modules else None), unknown
    if not first.holds or first.meaning == "none":
        return "none", unknown
    if first.meaning == "full":
        return "full", unknown
    # A comment may say which: "selective (op)".
    finer = [*ways, *find_phrases("checkpointing", comment)[0]]
    per_op = any(p.meaning == "per_op" and p.holds for p in finer)
    return ("per_op" if per_op else "selective"), unknown


def read_offload(row: Row) -> tuple[Offload, tuple[str, ...]]:
    """Return the offload, from the offload cell or else from sharding and system."""
    cell = normalized(row.cell("offload"))
    main, _ = split_comment(cell)
    phrases, unknown = find_phrases("offload", main)
    names = {p.meaning for p in phrases if p.holds}
    system = " , ".join(normalized(row.cell(name)) for name in ("sharding", "system"))
    if not cell and re.search(r"offload|infinity", system):
        names = set() if re.search(r"\bno offload", system) else {"offload"}
    if share := re.search(r"(\d+(?:\.\d+)?) ?% of", main):
        return Offload(optimizer="cpu", fraction=min(1.0, float(share[1]) / 100)), unknown
    parts = names & {"params", "grads", "optimizer", "activations"}
    if not names & {"offload", "all"} and not parts:
        return Offload(), unknown
    whole = "all" in names or bool(re.search(r"\bfull|\ball\b", main))
    if whole or not parts:
        # "CPU offload" alone: everything under stage 3, and what the step needs under stage 1 or 2.
        # ZeRO-Offload (arXiv:2101.06840, section 3) keeps 16-bit parameters on the device.
        has_params = whole or read_stage(f"{system} {main}") == 3
        parts = {"params", "optimizer"} if has_params else {"optimizer"}
    return Offload(
        params="cpu" if "params" in parts else "device",
        optimizer="cpu" if parts - {"activations"} else "device",
        activations="cpu" if "activations" in parts else "device",
    ), unknown


def read_stage(text: str) -> int | None:
    """Return the ZeRO stage that a normalized text means, None if it means none."""
    if re.search(r"stage not (?:stated|told|given|known)", text):
        return None
    stages = [*read_data("phrases")["sharding"]["stages"], (3, "zero")]
    return next(
        (stage for stage, pattern in stages if re.search(rf"\b(?:{pattern})\b", text)), None
    )


def read_group(text: str) -> int | None:
    """Return the ranks of a shard group, None if a normalized text does not say."""
    if number := re.search(r"\b(?:within|groups?(?: of)?) (\d+)|\bfsdp (\d\d|[4-9]) within", text):
        return int(number[1] or number[2])
    return 8 if re.search(r"\bhsdp\b|hybrid ?shard", text) else None


# -- shapes
def parse_arch(text: str) -> dict[str, int]:
    """Read ``L32 h4096 f14336 a32 kv8 V128256`` into numbers by letter; skip unknown parts.

    ``V250k`` is 250,000 and ``mlp_ratio 8/3`` becomes ``f``, rounded up to a multiple of 256.
    """
    found: dict[str, int] = {}
    for key, number, kilo in re.findall(r"\b(L|h|f|a|kv|V)~?(\d+(?:\.\d+)?)(k?)\b", text):
        found.setdefault(key, round(float(number) * (1000 if kilo else 1)))
    ratio = re.search(r"mlp_ratio (\d+)/(\d+)", text)
    if ratio and "h" in found and "f" not in found:
        width = found["h"] * int(ratio[1]) // int(ratio[2])
        found["f"] = -(-width // 256) * 256
    return found


def resolve_shape(row: Row) -> DecoderShape:
    """Return the decoder of a row.

    **Raises** Unmodelled if it is no decoder, or if its sizes are neither given nor known.
    """
    name = re.sub("meta-|(?<=llama)-?(?=3)", "", row.cell("model").lower()).replace(" ", "-")
    text = f"{row.cell('model').lower()} {row.cell('arch').lower()}"
    arch, known, table = parse_arch(row.cell("arch")), dict[str, Any](), read_data("models")
    for word, reason in table["no_decoders"].items():
        if word in text:
            raise Unmodelled(f"{reason} (no decoder formulas)")
    if not {"L", "h"} <= set(arch):
        models = table["shapes"]
        presets = {re.sub("(?<=llama)-(?=3)", "", preset): preset for preset in preset_names()}
        for key in sorted((*models, *presets), key=len, reverse=True):
            if name.replace("3.1-", "3-").replace("tiny-llama", "tinyllama").startswith(key):
                if key in presets:
                    return find_preset(presets[key]).shape
                known = models[key]
                arch = parse_arch(known["arch"])
                break
    if any(not 1 <= value <= _LARGEST_ARCH[key] for key, value in arch.items()):
        raise Unmodelled("arch out of range")
    dim, params = arch.get("h"), row.number("params_b")
    if not dim or not ("L" in arch or params is not None):
        raise Unmodelled("shape not given and not known")
    # 12 L h^2 + V h = P, solved for L.
    rest = (params or 0) * 1e9 - arch.get("V", 0) * dim
    layers = arch.get("L") or round(rest / (12 * dim * dim))
    if not 1 <= layers <= _LARGEST_ARCH["L"]:
        raise Unmodelled("params_b and arch do not agree")
    heads = arch.get("a") or table["heads"].get(str(dim)) or max(1, dim // 128)
    vocab = arch.get("V", 50257 if "gpt-2" in name else 51200)
    if any(word in text for word in table["gated"]) or "kv" in arch:
        width = arch.get("f") or -(-dim * 8 // 3 // 256) * 256
        shape = llama_shape(layers, dim, heads, arch.get("kv", heads), width, vocab)
        shape = replace(shape, tied="tied" in text, qkv_bias="qwen" in text)
    else:
        shape = gpt_shape(layers, dim, heads, vocab, positions=row.count("seq_len", 1024))
        shape = replace(shape, ffn=arch.get("f", 4 * dim))
        if "mpt" in name:  # ALiBi, no biases
            shape = replace(shape, positions=0, norm_bias=False, qkv_bias=False, bias=False)
    kinds = {"experts": Experts, "latent": Latent}
    parts = {field: kind(**known[field]) for field, kind in kinds.items() if field in known}
    return replace(shape, **known.get("shape", {}), **parts)
