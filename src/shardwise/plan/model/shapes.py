"""The shape of a decoder as numbers: exact parameter counts per unit, and FLOPs per token.

Note [What the FLOPs count]
A matrix product of [t, m] with [m, n] is 2 t m n, and the backward of a linear map is twice its
forward. Lookups, norms and elementwise operations are not counted (they are bound by bytes). Full
attention counts 4 s q per token, forward (scores, and scores times values), as Korthikanti et al.
2022 (appendix A) and PaLM (Chowdhery et al. 2022, appendix B) count it; a causal kernel computes
half of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

NormKind = Literal["layer", "rms"]


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward; ``ffn`` is one expert's width.

    The first ``dense_layers`` have the shape's plain one; ``shared`` experts see all tokens. The
    router's ``scoring`` is that of Mixtral or of DeepSeek-V3.
    """

    num: int
    top_k: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): widths by head.

    Keys and values are made of one vector of ``kv_rank`` elements per token, beside a rotary key of
    ``rope`` that all heads share; queries of one of ``q_rank`` elements, or directly (0). A key has
    ``nope + rope`` elements, a value ``value``.
    """

    kv_rank: int
    q_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class DecoderShape:
    """A decoder of the GPT or Llama family.

    ``positions`` is the number of learned positions (0: rotary, ALiBi or none). ``qkv_bias`` and
    ``bias`` are those of the query, key and value projections and of all other linear maps.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    norm: NormKind = "rms"
    norm_bias: bool = False
    tied: bool = False
    positions: int = 0
    qkv_bias: bool = False
    bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def q_dim(self) -> int:
        """Width of all query heads."""
        if self.latent is not None:
            return self.heads * (self.latent.nope + self.latent.rope)
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads, which is that of the value heads (their mean, of a latent's)."""
        if self.latent is not None:
            return self.heads * (self.latent.nope + self.latent.rope + self.latent.value) // 2
        return self.kv_heads * self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the stream."""
        return self.dim * (2 if self.norm_bias else 1)

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention, without the norm before it."""
        if self.latent is not None:
            return sum(rows * columns for _, rows, columns in latent_products(self))
        weights = self.dim * (2 * self.q_dim + 2 * self.kv_dim)
        biases = self.qkv_bias * (self.q_dim + 2 * self.kv_dim) + self.bias * self.dim
        return weights + biases + 2 * self.head_dim * self.qk_norm

    def _ffn_params(self, width: int) -> int:
        up = 2 if self.gated else 1
        return (up + 1) * self.dim * width + self.bias * (up * width + self.dim)

    def ffn_params(self, layer: int = -1) -> int:
        """Parameters of a layer's feed-forward (default: the last layer's), router included."""
        experts = self.experts
        if experts is None or 0 <= layer < experts.dense_layers:
            return self._ffn_params(self.ffn)
        return self.routed_params + self.router_params + self.shared_params

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of one layer."""
        experts = self.experts
        return experts.num * self._ffn_params(experts.ffn) if experts is not None else 0

    @property
    def router_params(self) -> int:
        """Parameters of one layer's router."""
        return self.dim * self.experts.num if self.experts is not None else 0

    @property
    def shared_params(self) -> int:
        """Parameters of one layer's feed-forward that all tokens meet, without the router."""
        experts = self.experts
        if experts is None:
            return self._ffn_params(self.ffn)
        return experts.shared * self._ffn_params(experts.ffn)

    @property
    def routed_flops_per_token(self) -> int:
        """Forward FLOPs per token of a layer's routed experts."""
        experts = self.experts
        return 2 * experts.top_k * self._ffn_params(experts.ffn) if experts is not None else 0

    def of_layer(self, layer: int) -> "DecoderShape":
        """Return the shape whose layers are all like this one: without experts, or with them."""
        experts = self.experts
        if experts is None or layer >= experts.dense_layers:
            return self
        return replace(self, experts=None)

    def active_ffn_params(self, layer: int = -1) -> int:
        """Parameters of a layer's feed-forward that a token meets."""
        experts = self.experts
        if experts is None or 0 <= layer < experts.dense_layers:
            return self._ffn_params(self.ffn)
        met = experts.top_k + experts.shared
        return met * self._ffn_params(experts.ffn) + self.router_params

    def layer_params(self, layer: int = -1) -> int:
        """Parameters of one decoder layer with its two norms."""
        return self.attention_params + self.ffn_params(layer) + 2 * self.norm_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the token table and of learned positions."""
        return (self.vocab + self.positions) * self.dim

    @property
    def head_params(self) -> int:
        """Parameters of the output projection beyond the token table: 0 where tied."""
        return 0 if self.tied else self.vocab * self.dim

    @property
    def num_params(self) -> int:
        """All parameters, tied ones counted once."""
        layers = sum(self.layer_params(i) for i in range(self.layers))
        return layers + self.embedding_params + self.head_params + self.norm_params

    def layer_flops_per_token(self, seq: int, *, causal: bool = False) -> tuple[int, int]:
        """Return one layer's forward FLOPs per token: (matrix products, attention core)."""
        attention = self.dim * 2 * (self.q_dim + self.kv_dim)
        if self.latent is not None:
            attention = self.attention_params
        products = 2 * (attention + self.active_ffn_params())
        return products, 4 * seq * self.q_dim // (2 if causal else 1)

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs per token of the output projection."""
        return 2 * self.dim * self.vocab


def latent_products(shape: DecoderShape) -> tuple[tuple[str, int, int], ...]:
    """Return name, rows and columns of the products of a latent attention; none for others.

    Those that make a latent, and the rotary key, are whole on all ranks of a tensor group.
    """
    latent, dim = shape.latent, shape.dim
    if latent is None:
        return ()
    whole = [("latent", latent.kv_rank + latent.rope, dim)]
    split = [("key, value", shape.heads * (latent.nope + latent.value), latent.kv_rank)]
    if latent.q_rank:
        whole.append(("query latent", latent.q_rank, dim))
    split.append(("query", shape.q_dim, latent.q_rank or dim))
    return (*whole, *split, ("out", dim, shape.heads * latent.value))


def gpt_shape(layers: int, dim: int, heads: int, vocab: int, *, positions: int = 0) -> DecoderShape:
    """Return a GPT-2/GPT-3 shape: LayerNorm, biases, 4 dim wide GELU, tied head."""
    return DecoderShape(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        ffn=4 * dim,
        vocab=vocab,
        gated=False,
        norm="layer",
        norm_bias=True,
        tied=True,
        positions=positions,
        qkv_bias=True,
        bias=True,
    )


def llama_shape(
    layers: int, dim: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool = False
) -> DecoderShape:
    """Return a Llama shape: RMSNorm, rotary positions, SwiGLU, no biases."""
    return DecoderShape(layers, dim, heads, kv_heads, dim // heads, ffn, vocab, tied=tied)


def mpt_shape(layers: int, dim: int, heads: int, ffn: int, vocab: int, seq: int) -> DecoderShape:
    """Return an MPT shape as llm-foundry trains it: GPT with one learned position per token."""
    return replace(gpt_shape(layers, dim, heads, vocab, positions=seq), ffn=ffn)


_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "internlm", "gemma", "gpt2", "mixtral")


def shape_from_config(config: Mapping[str, object]) -> DecoderShape:
    """Read a Hugging Face ``config.json`` of a Llama-like or GPT-2 model.

    **Raises** ConfigError where the family is not known or a size is missing or not positive.
    """
    family = str(config.get("model_type", ""))
    if family not in _FAMILIES:
        known = f"{', '.join(_FAMILIES)}{did_you_mean(family, _FAMILIES)}"
        raise ConfigError(f"config.json: model_type is {family!r}, known are {known}")
    if family == "gpt2":
        get = _sizes(config, ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions"))
        return gpt_shape(*get[:4], positions=get[4])
    layers, dim, heads, ffn, vocab = _sizes(
        config,
        (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        ),
    )
    return DecoderShape(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", dim // heads),
        ffn=ffn,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", family == "gemma")),
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
        qk_norm=family == "qwen3",
        experts=_experts(config, family, ffn),
    )


def _experts(config: Mapping[str, object], family: str, ffn: int) -> Experts | None:
    if family != "mixtral":
        return None
    num, top_k = _sizes(config, ("num_local_experts", "num_experts_per_tok"))
    if top_k > num:
        raise ConfigError(
            f"config.json: num_experts_per_tok must be at most num_local_experts {num}, got {top_k}"
        )
    return Experts(num, top_k, ffn)


def _sizes(config: Mapping[str, object], names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(_size(config, name, None) for name in names)


def _size(config: Mapping[str, object], name: str, default: int | None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value
