"""Rows of published runs: read a table of them without ever failing, and tell a row's shape.

A cell that cannot be read is None, never an error; what a model lacks is said as a reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.plan.model.shapes import (
    DecoderShape,
    Experts,
    Latent,
    gpt_shape,
    llama_shape,
    mpt_shape,
)

_DATA = Path(__file__).parent / "data"
# The second has what was found later, runs that ran out of memory among them.
TABLES = (_DATA / "published_runs.csv", _DATA / "more_runs.csv")
# Runs of pages that no constant, default or phrase was chosen by. Nothing is to be fitted to them.
UNSEEN = _DATA / "unseen_runs.csv"


# Larger figures are not those of a run that was made.
_LARGEST = {"tp": 1024, "pp": 1024, "cp": 1024, "micro_batch": 1 << 16, "n_gpus": 1 << 20}
_LARGEST_ARCH = {"L": 2000, "h": 1 << 17, "f": 1 << 20, "a": 4096, "kv": 4096, "V": 1 << 24}


class Unmodelled(Exception):
    """Why a row is not predicted, in a few words that rows of one kind share."""


_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_arch(text: str) -> dict[str, int]:
    """Read ``L32 h4096 f14336 a32 kv8 V128256`` into numbers by letter; unknown parts are left out.

    ``V250k`` is 250,000 and ``mlp_ratio 8/3`` becomes ``f``, rounded up to a multiple of 256.
    """
    found: dict[str, int] = {}
    for key, number, kilo in re.findall(r"\b(L|h|f|a|kv|V)~?" + _NUMBER + r"(k?)\b", text):
        found.setdefault(key, round(float(number) * (1000 if kilo else 1)))
    ratio = re.search(r"mlp_ratio (\d+)/(\d+)", text)
    if ratio and "h" in found and "f" not in found:
        width = found["h"] * int(ratio[1]) // int(ratio[2])
        found["f"] = -(-width // 256) * 256
    return found


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
        """Return a positive whole number; without a default a missing one is a reason."""
        value = self.number(name)
        if value is not None and 1 <= value <= _LARGEST.get(name, 1 << 22):
            return int(value)
        if value is not None and value > 1:
            raise Unmodelled(f"{name} out of range")
        told = re.search(rf"\b{name}(\d+)", self.cell("sharding").lower())  # ZeRO-1(dp2)+tp2+pp4
        if told and len(name) == 2 and 1 <= int(told[1]) <= 1024:
            return int(told[1])
        if default is None:
            raise Unmodelled(f"no {name} given")
        return default

    @property
    def ranks(self) -> int:
        """Number of GPUs: as told, or the product of the degrees."""
        degrees = [self.count(name, 1) for name in ("dp", "tp", "pp", "cp")]
        product = degrees[0] * degrees[1] * degrees[2] * degrees[3]
        return self.count("n_gpus", product)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks: as told, or what the other degrees leave."""
        others = self.count("tp", 1) * self.count("pp", 1) * self.count("cp", 1)
        return self.count("dp", max(1, self.ranks // others))

    def says(self, name: str, *words: str) -> bool:
        """Tell whether a cell has one of the words, in any case."""
        cell = self.cell(name).lower()
        return any(word in cell for word in words)


def read_rows(*paths: Path) -> list[Row]:
    """Read tables, those of `data/` if none is named; columns that are missing count as empty."""
    found = []
    for path in paths or TABLES:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            found += [
                Row({str(k): str(v or "").strip() for k, v in line.items() if k is not None})
                for line in csv.DictReader(lines)
            ]
    return found


# Shapes of models that rows name without an arch; from their public config.json files.
_QWEN2 = {"qkv_bias": True}
MODELS: dict[str, DecoderShape] = {
    "llama-2-7b": llama_shape(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": llama_shape(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": llama_shape(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": llama_shape(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-8b": llama_shape(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": llama_shape(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-70b": llama_shape(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": llama_shape(126, 16384, 128, 8, 53248, 128256),
    "llama-3.2-1b": llama_shape(16, 2048, 32, 8, 8192, 128256, tied=True),
    "llama-3.2-3b": llama_shape(28, 3072, 24, 8, 8192, 128256, tied=True),
    "tinyllama-1.1b": llama_shape(22, 2048, 32, 4, 5632, 32000),
    "tiny-llama-1.1b": llama_shape(22, 2048, 32, 4, 5632, 32000),
    "mistral-7b": llama_shape(32, 4096, 32, 8, 14336, 32000),
    "gemma-2b": replace(llama_shape(18, 2048, 8, 1, 16384, 256000, tied=True), head_dim=256),
    "gemma-7b": replace(llama_shape(28, 3072, 16, 16, 24576, 256000, tied=True), head_dim=256),
    "internlm-7b": llama_shape(32, 4096, 32, 32, 11008, 103168),
    "internlm-20b": llama_shape(60, 5120, 40, 40, 13824, 103168),
    "qwen-1.8b": replace(llama_shape(24, 2048, 16, 16, 5504, 151936), **_QWEN2),
    "qwen-7b": replace(llama_shape(32, 4096, 32, 32, 11008, 151936), **_QWEN2),
    "qwen-14b": replace(llama_shape(40, 5120, 40, 40, 13696, 152064), **_QWEN2),
    "qwen-72b": replace(llama_shape(80, 8192, 64, 64, 24576, 152064), **_QWEN2),
    "qwen2.5-0.5b": replace(llama_shape(24, 896, 14, 2, 4864, 151936, tied=True), **_QWEN2),
    "qwen2.5-1.5b": replace(llama_shape(28, 1536, 12, 2, 8960, 151936, tied=True), **_QWEN2),
    "qwen2.5-3b": replace(llama_shape(36, 2048, 16, 2, 11008, 151936, tied=True), **_QWEN2),
    "qwen2.5-7b": replace(llama_shape(28, 3584, 28, 4, 18944, 152064), **_QWEN2),
    "qwen3-30b-a3b": DecoderShape(
        48, 2048, 32, 4, 128, 6144, 151936, qk_norm=True, experts=Experts(128, 8, 768)
    ),
    "mixtral-8x7b": replace(
        llama_shape(32, 4096, 32, 8, 14336, 32000), experts=Experts(8, 2, 14336)
    ),
    "moonlight-16b-a3b": DecoderShape(
        27,
        2048,
        16,
        16,
        128,
        11264,
        163840,
        experts=Experts(64, 6, 1408, shared=2, dense_layers=1, scoring="sigmoid"),
        latent=Latent(512, 0, 128, 64, 128),
    ),
    "deepseek-v3": DecoderShape(
        61,
        7168,
        128,
        128,
        128,
        18432,
        129280,
        experts=Experts(256, 8, 2048, shared=1, dense_layers=3, scoring="sigmoid"),
        latent=Latent(512, 1536, 128, 64, 128),
    ),
    "deepseek-v2-lite": DecoderShape(
        27,
        2048,
        16,
        16,
        128,
        10944,
        102400,
        experts=Experts(64, 6, 1408, shared=2, dense_layers=1),
        latent=Latent(512, 0, 128, 64, 128),
    ),
    "stablelm-alpha-3b": replace(gpt_shape(16, 4096, 32, 50688), tied=False),
    "stablelm-alpha-7b": replace(gpt_shape(16, 6144, 48, 50432), tied=False),
    "pythia-6.9b": replace(gpt_shape(32, 4096, 32, 50432), tied=False),
    # transformers' GPT-2 and the authors' own sizes (bigscience experiments/gpt2.md).
    "gpt-2 52b": gpt_shape(64, 8192, 64, 50257, positions=1024),
}

_GATED = ("llama", "qwen", "mistral", "internlm", "gemma", "deepseek", "swiglu", "yi-", "phi-3")
_FOREIGN = (
    ("vit", "a vision model"),
    ("t5", "an encoder-decoder"),
    ("enc", "an encoder-decoder"),
    ("bert", "an encoder"),
    ("nemotron-3", "a hybrid"),
    ("gpt-oss", "two models in one row"),
)


# Where a row prints no heads ("a?"): what R408 prints for this width in the same table.
_HEADS = {14400: 96}
_ENCODER_DECODER = re.compile(
    r"(\d+) enc \+ (\d+) dec layers, d_model (\d+), ffn \d+, (\d+) heads, v(\d+)"
)


def resolve_shape(row: Row) -> DecoderShape:
    """Return the decoder of a row.

    **Raises** Unmodelled where it is no decoder, or its sizes are neither told nor known.
    """
    name = row.cell("model").lower()
    told = f"{name} {row.cell('arch').lower()}"
    arch = parse_arch(row.cell("arch"))
    both = _ENCODER_DECODER.search(told)
    if both:
        enc, dec, dim, heads, vocab = (int(x) for x in both.groups())
        return _encoder_decoder(enc, dec, dim, heads, vocab)
    for word, reason in _FOREIGN:
        if word in told:
            raise Unmodelled(f"{reason} (no decoder formulas)")
    if any(not 1 <= value <= _LARGEST_ARCH[key] for key, value in arch.items()):
        raise Unmodelled("arch out of range")
    known = _known(name, row)
    if known is not None and not {"L", "h"} <= set(arch):
        return known
    dim = arch.get("h")
    if not dim:
        raise Unmodelled("shape not told and not known")
    layers = arch.get("L") or _layers_from_params(row, dim, arch)
    heads = arch.get("a") or _HEADS.get(dim) or max(1, dim // 128)
    vocab = arch.get("V", 50257 if "gpt-2" in name else 51200)
    if "mpt" in name:
        return mpt_shape(layers, dim, heads, arch.get("f", 4 * dim), vocab, row.count("seq_len"))
    if any(word in told for word in _GATED) or "kv" in arch:
        width = arch.get("f") or -(-dim * 8 // 3 // 256) * 256
        shape = llama_shape(layers, dim, heads, arch.get("kv", heads), width, vocab)
        tied = "tied" in told
        return replace(shape, tied=tied, qkv_bias="qwen" in told)
    return replace(
        gpt_shape(layers, dim, heads, vocab, positions=row.count("seq_len", 1024)),
        ffn=arch.get("f", 4 * dim),
    )


def _encoder_decoder(enc: int, dec: int, dim: int, heads: int, vocab: int) -> DecoderShape:
    """Return a decoder with as many parameters: cross-attention is a third of a layer."""
    if not (1 <= enc + dec <= 2000 and 1 <= heads <= dim <= 1 << 17 and 1 <= vocab <= 1 << 24):
        raise Unmodelled("arch out of range")
    return replace(gpt_shape(enc + round(dec * 4 / 3), dim, heads, vocab), tied=False)


def _known(name: str, row: Row) -> DecoderShape | None:
    plain = name.replace("meta-", "").replace(" ", "-").replace("llama3", "llama-3")
    for key, shape in MODELS.items():
        if plain.startswith(key.replace(" ", "-")):
            return shape
    params = row.number("params_b")
    if params is not None and "llama" in name and "h" not in parse_arch(row.cell("arch")):
        near = (s for k, s in MODELS.items() if k.startswith("llama-2"))
        return next((s for s in near if abs(s.num_params / 1e9 / params - 1) < 0.05), None)
    return None


def _layers_from_params(row: Row, dim: int, arch: dict[str, int]) -> int:
    """Solve 12 L h^2 + V h = P for the number of layers."""
    params = row.number("params_b")
    if params is None:
        raise Unmodelled("shape not told and not known")
    layers = round((params * 1e9 - arch.get("V", 0) * dim) / (12 * dim * dim))
    if not 1 <= layers <= _LARGEST_ARCH["L"]:
        raise Unmodelled("params_b and arch do not agree")
    return layers
