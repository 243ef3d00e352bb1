"""What a decoder layer keeps for its backward, byte by byte: one table, each line with its source.

Note [Bytes kept per token]
A line says: so many elements per token and element of a width. ``compute`` elements have the
compute dtype, ``mask`` ones 1 byte, ``float32`` ones 4 bytes whatever the compute dtype; ``upcast``
ones are copies in float32, which do not exist where the compute dtype is float32 already. ``split``
says what tensor parallelism does: it divides ``tensor`` lines, and ``sequence`` lines only together
with sequence parallelism; ``whole`` ones never, and ``routed`` ones where experts are spread, since
the ranks of a tensor group then share their tokens. With 2-byte compute, dropout and eager
attention a GPT layer comes to s b h (34 + 5 a s / h), of which 10 are ``sequence`` and
24 + 5 a s / h ``tensor``: every cell of the table of Korthikanti et al. 2022 (arXiv:2205.05198,
section 4).

Note [Eager layers keep more]
A fused or compiled layer keeps the table's lines. Written in eager PyTorch it keeps copies too: the
norm's input upcast to float32, the activation's output apart from the product, keys and values
repeated for every query head. Each is a line with its own name, so an implementation is a set of
names. Sums checked: Llama-3.1-8B eager 52 h + 2 h (transformers, measured 56 h), torchtune's 3B
ladder from eager to compiled 8.8 GiB (measured 9.0).

Note [The built-in decoder]
It is eager too, and has lines of its own: norms that keep their input and what they make of it in
float32, attention's output as the kernel wrote it and as the projection reads it, whole inputs of
projections under tensor parallelism (torch's parallel layers gather them once), and the keys and
values of all context ranks. Held against the allocator's trace by tests/campaigns/composed.py.
What transformers has of Llama, Mistral and Qwen differs in a few: its norms scale in the compute
dtype, and heads are not copied to lie side by side. Held against traces by test_one_model.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.sizes import DTYPE_BYTES, DtypeName

# fmt: off
Width = Literal[
    "dim", "q", "kv", "other_kv", "repeated_kv", "ffn", "heads", "scores", "token",
    "experts", "choices", "routed", "routed_ffn", "latent",
]
Implementation = Literal[
    "fused", "compiled", "eager", "eager_repeat_kv", "eager_double_norm", "eager_tanh_gelu",
    "decoder", "transformers",
]
# fmt: on
Kind = Literal["compute", "mask", "float32", "upcast", "int64"]
Group = Literal["norm", "attention", "core", "ffn", "routed"]
Split = Literal["sequence", "tensor", "whole", "routed"]


@dataclass(frozen=True)
class Kept:
    """One line: ``count`` elements of ``kind`` per token and element of ``width``.

    ``only`` names what must hold for the line to exist (all of them); see `layer_facts`.
    """

    name: str
    width: Width
    count: float
    kind: Kind
    split: Split
    group: Group
    only: tuple[str, ...]
    meaning: str


_K = "arXiv:2205.05198 section 4.1"

KEPT: tuple[Kept, ...] = (
    Kept("norm input", "dim", 2, "compute", "sequence", "norm", ("megatron",),
         f"inputs of both norms; {_K}"),
    Kept("norms in float32", "dim", 4, "float32", "sequence", "norm", ("own", "rms"),
         "of both: the input, and what the weight multiplies"),
    Kept("norms in float32", "dim", 2, "float32", "sequence", "norm", ("transformers", "rms"),
         "of both: the input"),
    Kept("normed", "dim", 2, "compute", "sequence", "norm", ("transformers", "rms"),
         "of both: what the weight multiplies"),
    Kept("norm inputs", "dim", 2, "compute", "sequence", "norm", ("decoder", "layer"), "of both"),
    Kept("norm scale", "token", 2, "float32", "sequence", "norm", ("decoder",),
         "of both: one over the root of the mean square"),
    Kept("attention input", "dim", 1, "compute", "sequence", "attention", ("megatron",),
         f"of q, k, v; {_K}"),
    Kept("attention input", "dim", 1, "compute", "whole", "attention", ("decoder",), "of q, k, v"),
    Kept("query norm", "q", 1, "compute", "tensor", "attention", ("qk_norm", "megatron"), "input"),
    Kept("key norm", "kv", 1, "compute", "tensor", "attention", ("qk_norm", "megatron"), "input"),
    Kept("query norm", "q", 2, "float32", "tensor", "attention", ("qk_norm", "own"),
         "the input, and what the weight multiplies"),
    Kept("key norm", "kv", 2, "float32", "tensor", "attention", ("qk_norm", "own"), "the same"),
    Kept("query norm", "q", 1, "float32", "tensor", "attention", ("qk_norm", "transformers"),
         "the input"),
    Kept("key norm", "kv", 1, "float32", "tensor", "attention", ("qk_norm", "transformers"),
         "the input"),
    Kept("query normed", "q", 1, "compute", "tensor", "attention", ("qk_norm", "transformers"),
         "what the weight multiplies"),
    Kept("key normed", "kv", 1, "compute", "tensor", "attention", ("qk_norm", "transformers"),
         "what the weight multiplies"),
    Kept("query", "q", 1, "compute", "tensor", "attention", (), f"for the scores; {_K}"),
    Kept("key, value", "kv", 2, "compute", "tensor", "attention", (), f"for the scores; {_K}"),
    Kept("latent", "latent", 2, "compute", "whole", "attention", ("latent",),
         "what queries, keys and values are made of, before and after its norm"),
    Kept("other key, value", "other_kv", 2, "compute", "tensor", "attention", ("decoder",),
         "those of the other context ranks, or repeated ones, which they exchange"),
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
    Kept("attention columns", "q", 1, "compute", "tensor", "attention",
         ("own", "many_heads", "rotary"),
         "the output with the heads side by side, which the projection reads"),
    Kept("attention mask", "dim", 1, "mask", "sequence", "attention", ("dropout",), f"mask; {_K}"),
    Kept("ffn input", "dim", 1, "compute", "sequence", "ffn", ("trained", "megatron"),
         f"of the first product, for its weights' gradient; {_K}"),
    Kept("ffn input", "dim", 1, "compute", "whole", "ffn", ("decoder",), "of the first product"),
    Kept("activation input", "ffn", 1, "compute", "tensor", "ffn", (), f"gelu or gate; {_K}"),
    Kept("up", "ffn", 1, "compute", "tensor", "ffn", ("gated",), "the gate's other factor"),
    Kept("activation output", "ffn", 1, "compute", "tensor", "ffn", ("gated", "eager"),
         "silu(gate), kept for its product with up where the two are not fused"),
    Kept("activation parts", "ffn", 3, "compute", "tensor", "ffn", ("tanh_gelu",),
         "gelu written with tanh, pow and products: 0.5 x, tanh(..) and 1 + tanh(..)"),
    Kept("last input", "ffn", 1, "compute", "tensor", "ffn", ("trained",),
         f"of the last product, for its weights' gradient; {_K}"),
    Kept("adapter inputs", "dim", 5, "upcast", "whole", "attention", ("float32_adapters",),
         "of adapters beside q, k, v, gate and up, each its own copy, as peft casts them"),
    Kept("adapter input of projection", "q", 1, "upcast", "tensor", "attention",
         ("float32_adapters",), "the same beside the attention's last product"),
    Kept("adapter input of last product", "ffn", 1, "upcast", "tensor", "ffn",
         ("float32_adapters",), "the same beside the feed-forward's"),
    Kept("ffn mask", "dim", 1, "mask", "sequence", "ffn", ("dropout",), f"mask; {_K}"),
    Kept("router input", "dim", 1, "upcast", "whole", "routed", ("experts", "decoder"),
         "scores are computed in float32"),
    Kept("scores of experts", "experts", 1, "float32", "whole", "routed", ("experts",),
         "the router's, for its gradient"),
    Kept("weights of experts", "choices", 2, "float32", "whole", "routed", ("experts",),
         "of those chosen, and normalized"),
    Kept("chosen experts", "choices", 1, "int64", "whole", "routed", ("experts",), "their numbers"),
    Kept("places of rows", "choices", 2, "int64", "routed", "routed", ("experts",),
         "where each row went, and where it came from"),
    Kept("places of arrived rows", "choices", 2, "int64", "routed", "routed", ("experts", "spread"),
         "the same of rows from all ranks"),
    Kept("routed rows", "routed", 1, "compute", "routed", "routed", ("experts", "trained"),
         "a copy of each token for each of its experts, for their weights' gradient"),
    Kept("gate of experts", "routed_ffn", 1, "compute", "routed", "routed", ("experts",),
         "as activation input"),
    Kept("up of experts", "routed_ffn", 1, "compute", "routed", "routed", ("experts", "gated"),
         "the gate's other factor"),
    Kept("activations of experts", "routed_ffn", 1, "compute", "routed", "routed",
         ("experts", "gated", "eager"), "as activation output"),
    Kept("last input of experts", "routed_ffn", 1, "compute", "routed", "routed",
         ("experts", "trained"), "of the last product"),
    Kept("output of experts", "routed", 1, "compute", "routed", "routed", ("experts",),
         "what each made of its copy, for the gradient of its weight in the sum"),
    Kept("norm in float32", "dim", 2, "upcast", "sequence", "norm", ("rms", "eager", "megatron"),
         "x.float() of both norms: RMSNorm in eager PyTorch squares and scales in float32"),
    Kept("normed in float32", "dim", 1, "upcast", "sequence", "norm", ("rms", "double_norm"),
         "the weight too is applied in float32: the kept normed values are 4 bytes, not 2, twice"),
)  # fmt: skip

IMPLEMENTATIONS: dict[Implementation, frozenset[str]] = {
    "fused": frozenset({"megatron"}),
    "compiled": frozenset({"megatron"}),
    "eager": frozenset({"megatron", "eager"}),
    "eager_repeat_kv": frozenset({"megatron", "eager", "repeat_kv"}),
    "eager_double_norm": frozenset({"megatron", "eager", "repeat_kv", "double_norm"}),
    "eager_tanh_gelu": frozenset({"megatron", "eager", "tanh_gelu"}),
    "decoder": frozenset({"decoder", "own", "eager"}),
    "transformers": frozenset({"decoder", "transformers", "eager"}),
}


def layer_facts(
    shape: DecoderShape,
    implementation: Implementation,
    *,
    flash: bool,
    dropout: bool,
    trained: bool = True,
    spread: bool = False,
    many_heads: bool = True,
    float32_adapters: bool = False,
) -> frozenset[str]:
    """Return the names that the lines' ``only`` ask for.

    ``trained`` False: the layer's own weights are frozen (adapters learn), so what only their
    gradients need is not kept. ``spread``: experts lie on several ranks. ``many_heads``: a rank has
    several, whose outputs are copied to lie side by side. ``float32_adapters``: adapters beside all
    linear maps learn in float32, and read their inputs in it.
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
            ("layer", shape.norm == "layer"),
            ("rotary", shape.norm == "rms" and not shape.positions),
            ("qk_norm", shape.qk_norm),
            ("experts", shape.experts is not None),
            ("latent", shape.latent is not None),
            ("spread", spread),
            ("many_heads", many_heads),
            ("float32_adapters", float32_adapters),
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
    ep: int = 1,
    sequence_parallel: bool = False,
    other_kv: int = 0,
) -> int:
    """Return the bytes of a line for so many tokens of sequences of length ``seq``.

    With experts the feed-forward's width is that of the shared ones; ``other_kv`` is the width of
    keys that context ranks have beside their own.
    """
    width = _widths(shape, seq, other_kv)[line.width]
    per_element = {
        "compute": DTYPE_BYTES[dtype],
        "mask": 1,
        "float32": 4,
        "upcast": 0 if dtype == "float32" else 4,
        "int64": 8,
    }[line.kind]
    divides = {
        "tensor": True,
        "sequence": sequence_parallel,
        "whole": False,
        "routed": ep > 1,
    }[line.split]
    return round(line.count * per_element * width * tokens / (tp if divides else 1))


def _widths(shape: DecoderShape, seq: int, other_kv: int) -> dict[Width, int]:
    experts = shape.experts
    chosen = 0 if experts is None else experts.top_k
    return {
        "dim": shape.dim,
        "q": shape.q_dim,
        "kv": shape.kv_dim,
        "other_kv": other_kv,
        "repeated_kv": shape.q_dim - shape.kv_dim,
        "ffn": shape.ffn if experts is None else experts.shared * experts.ffn,
        "heads": shape.heads,
        "scores": shape.heads * seq,
        "token": 1,
        "experts": 0 if experts is None else experts.num,
        "choices": chosen,
        "routed": chosen * shape.dim,
        "latent": shape.latent.kv_rank + shape.latent.q_rank if shape.latent is not None else 0,
        "routed_ffn": 0 if experts is None else chosen * experts.ffn,
    }
