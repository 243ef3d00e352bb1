"""What a decoder layer keeps for its backward, byte by byte: one table, each line with its source.

Note [Bytes kept per token]
A line says: so many elements per token and element of a width. ``compute`` elements have the
compute dtype, ``mask`` ones 1 byte, ``float32`` ones 4 bytes whatever the compute dtype; ``upcast``
ones are copies in float32, which do not exist where the compute dtype is float32 already. ``split``
says what tensor parallelism does: it divides ``tensor`` lines, and ``sequence`` lines only together
with sequence parallelism. With 2-byte compute, dropout and eager attention a GPT layer comes to
s b h (34 + 5 a s / h), of which 10 are ``sequence`` and 24 + 5 a s / h ``tensor``: every cell of
the table of Korthikanti et al. 2022 (arXiv:2205.05198, section 4).

Note [Eager layers keep more]
A fused or compiled layer keeps the table's lines. Written in eager PyTorch it keeps copies too: the
norm's input upcast to float32, the activation's output apart from the product, keys and values
repeated for every query head. Each is a line with its own name, so an implementation is a set of
names. Sums checked: Llama-3.1-8B eager 52 h + 2 h (transformers, measured 56 h), torchtune's 3B
ladder from eager to compiled 8.8 GiB (measured 9.0).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.sizes import DTYPE_BYTES, DtypeName

Width = Literal["dim", "q", "kv", "repeated_kv", "ffn", "heads", "scores"]
Kind = Literal["compute", "mask", "float32", "upcast"]
Group = Literal["norm", "attention", "core", "ffn"]
Implementation = Literal[
    "fused", "compiled", "eager", "eager_repeat_kv", "eager_double_norm", "eager_tanh_gelu"
]


@dataclass(frozen=True)
class Kept:
    """One line: ``count`` elements of ``kind`` per token and element of ``width``.

    ``only`` names what must hold for the line to exist (all of them); see `layer_facts`.
    """

    name: str
    width: Width
    count: float
    kind: Kind
    split: Literal["sequence", "tensor"]
    group: Group
    only: tuple[str, ...]
    meaning: str


_K = "arXiv:2205.05198 section 4.1"

KEPT: tuple[Kept, ...] = (
    Kept("norm input", "dim", 2, "compute", "sequence", "norm", (), f"inputs of both norms; {_K}"),
    Kept("attention input", "dim", 1, "compute", "sequence", "attention", (), f"of q, k, v; {_K}"),
    Kept("query", "q", 1, "compute", "tensor", "attention", (), f"for the scores; {_K}"),
    Kept("key, value", "kv", 2, "compute", "tensor", "attention", (), f"for the scores; {_K}"),
    Kept("repeated key, value", "repeated_kv", 2, "compute", "tensor", "attention", ("repeat_kv",),
         "keys and values copied to every query head, beyond the grouped ones"),
    Kept("scores", "scores", 1, "compute", "tensor", "core", ("scores",), f"softmax output; {_K}"),
    Kept("scores mask", "scores", 1, "mask", "tensor", "core", ("scores", "dropout"),
         f"mask; {_K}"),
    Kept("dropped scores", "scores", 1, "compute", "tensor", "core", ("scores", "dropout"),
         f"for the values; {_K}"),
    Kept("log-sum-exp", "heads", 1, "float32", "tensor", "core", ("flash",),
         "one float per row of scores; arXiv:2205.14135 section 3.1"),
    Kept("attention output", "q", 1, "compute", "tensor", "attention", (), f"of projection; {_K}"),
    Kept("attention mask", "dim", 1, "mask", "sequence", "attention", ("dropout",), f"mask; {_K}"),
    Kept("ffn input", "dim", 1, "compute", "sequence", "ffn", ("trained",),
         f"of the first product, for its weights' gradient; {_K}"),
    Kept("activation input", "ffn", 1, "compute", "tensor", "ffn", (), f"gelu or gate; {_K}"),
    Kept("up", "ffn", 1, "compute", "tensor", "ffn", ("gated",), "the gate's other factor"),
    Kept("activation output", "ffn", 1, "compute", "tensor", "ffn", ("gated", "eager"),
         "silu(gate), kept for its product with up where the two are not fused"),
    Kept("activation parts", "ffn", 3, "compute", "tensor", "ffn", ("tanh_gelu",),
         "gelu written with tanh, pow and products: 0.5 x, tanh(..) and 1 + tanh(..)"),
    Kept("last input", "ffn", 1, "compute", "tensor", "ffn", ("trained",),
         f"of the last product, for its weights' gradient; {_K}"),
    Kept("ffn mask", "dim", 1, "mask", "sequence", "ffn", ("dropout",), f"mask; {_K}"),
    Kept("norm in float32", "dim", 2, "upcast", "sequence", "norm", ("rms", "eager"),
         "x.float() of both norms: RMSNorm in eager PyTorch squares and scales in float32"),
    Kept("normed in float32", "dim", 1, "upcast", "sequence", "norm", ("rms", "double_norm"),
         "the weight too is applied in float32: the kept normed values are 4 bytes, not 2, twice"),
)  # fmt: skip

IMPLEMENTATIONS: dict[Implementation, frozenset[str]] = {
    "fused": frozenset(),
    "compiled": frozenset(),
    "eager": frozenset({"eager"}),
    "eager_repeat_kv": frozenset({"eager", "repeat_kv"}),
    "eager_double_norm": frozenset({"eager", "repeat_kv", "double_norm"}),
    "eager_tanh_gelu": frozenset({"eager", "tanh_gelu"}),
}


def layer_facts(
    shape: DecoderShape,
    implementation: Implementation,
    *,
    flash: bool,
    dropout: bool,
    trained: bool = True,
) -> frozenset[str]:
    """Return the names that the lines' ``only`` ask for.

    ``trained`` False: the layer's own weights are frozen (adapters learn), so what only their
    gradients need is not kept.
    """
    facts = set(IMPLEMENTATIONS[implementation])
    facts.add("flash" if flash else "scores")
    facts.update(
        name
        for name, holds in (
            ("dropout", dropout),
            ("trained", trained),
            ("gated", shape.gated),
            ("rms", shape.norm == "rms"),
        )
        if holds
    )
    return frozenset(facts)


def kept_lines(facts: frozenset[str]) -> Iterator[Kept]:
    """Yield the lines that a layer with these facts has."""
    return (line for line in KEPT if facts.issuperset(line.only))


def line_bytes(
    line: Kept,
    shape: DecoderShape,
    *,
    tokens: int,
    seq: int,
    dtype: DtypeName,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Return the bytes of a line for so many tokens of sequences of length ``seq``.

    With experts the feed-forward's width is that of the experts that a token is routed to.
    """
    widths: dict[Width, int] = {
        "dim": shape.dim,
        "q": shape.q_dim,
        "kv": shape.kv_dim,
        "repeated_kv": shape.q_dim - shape.kv_dim,
        "ffn": ffn_width(shape),
        "heads": shape.heads,
        "scores": shape.heads * seq,
    }
    size = DTYPE_BYTES[dtype]
    per_element = {
        "compute": size,
        "mask": 1,
        "float32": 4,
        "upcast": 0 if dtype == "float32" else 4,
    }[line.kind]
    degree = tp if line.split == "tensor" or sequence_parallel else 1
    return round(line.count * per_element * widths[line.width] * tokens / degree)


def ffn_width(shape: DecoderShape) -> int:
    """Return the feed-forward's width that a token meets."""
    experts = shape.experts
    return shape.ffn if experts is None else experts.ffn * (experts.top_k + experts.shared)
