"""The shape of a decoder in numbers: its matrices, exact parameter counts, FLOPs per token.

Note [What the FLOPs count]
A matrix product of [t, m] with [m, n] is 2 t m n, and the backward of a linear map is twice its
forward. Lookups, norms and elementwise operations are not counted (they are bound by bytes). Full
attention counts 4 s q per token, forward (scores, and scores times values), as Korthikanti et al.
2022 (appendix A) and PaLM (Chowdhery et al. 2022, appendix B) count it; a causal kernel computes
half of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.errors import ConfigError
from shardwise.keys import read_json, shown
from shardwise.spelling import did_you_mean

NormKind = Literal["layer", "rms"]
_SIZES = frozenset(
    (
        "hidden_size",
        "n_embd",
        "d_model",
        "dim",
        "head_dim",
        "vocab_size",
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "moe_intermediate_size",
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "n_positions",
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "num_experts_per_tok",
    )
)
_MAX_KEYS = 1000
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "internlm", "gemma", "gpt2", "mixtral")


class Matrix(NamedTuple):
    """One weight of a layer, and its bias of as many elements as it has rows.

    ``cut`` is the dim that tensor parallelism cuts; None: every rank has the whole matrix.
    """

    name: str
    rows: int
    columns: int
    cut: int | None
    bias: bool = False

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.rows * self.columns


def count_params(matrices: Sequence[Matrix]) -> int:
    """Return the number of parameters of matrices and their biases."""
    return sum(matrix.numel + matrix.bias * matrix.rows for matrix in matrices)


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward; ``ffn`` is one expert's width.

    The first ``dense_layers`` have the shape's plain feed-forward. ``shared`` experts see all
    tokens. The router's ``scoring`` is that of Mixtral or of DeepSeek-V3.
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

    # -- matrices
    @property
    def attention(self) -> tuple[Matrix, ...]:
        """Matrices of one layer's attention, in the order of the module.

        Those that make a latent are whole on all ranks of a tensor group.
        """
        latent, dim = self.latent, self.dim
        if latent is None:
            widths = {"query": self.q_dim, "key": self.kv_dim, "value": self.kv_dim}
            inputs = (Matrix(name, n, dim, 0, self.qkv_bias) for name, n in widths.items())
            return (*inputs, Matrix("out", dim, self.q_dim, 1, self.bias))
        queries = (Matrix("query latent", latent.q_rank, dim, None),) if latent.q_rank else ()
        return (
            Matrix("latent", latent.kv_rank + latent.rope, dim, None),
            *queries,
            Matrix("key, value", self.heads * (latent.nope + latent.value), latent.kv_rank, 0),
            Matrix("query", self.q_dim, latent.q_rank or dim, 0),
            Matrix("out", dim, self.heads * latent.value, 1),
        )

    def feed_forward(self, width: int) -> tuple[Matrix, ...]:
        """Return the matrices of a feed-forward of an inner width."""
        names = ("gate", "up") if self.gated else ("up",)
        inputs = (Matrix(name, width, self.dim, 0, self.bias) for name in names)
        return (*inputs, Matrix("down", self.dim, width, 1, self.bias))

    # -- parameters
    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the stream."""
        return self.dim * (2 if self.norm_bias else 1)

    def of_layer(self, layer: int) -> "DecoderShape":
        """Return the shape with all layers like this one: without experts, or with them.

        Counts of one layer are those of the shape's last layer.
        """
        experts = self.experts
        if experts is None or layer >= experts.dense_layers:
            return self
        return replace(self, experts=None)

    @property
    def router_params(self) -> int:
        """Parameters of one layer's router."""
        return self.dim * self.experts.num if self.experts is not None else 0

    @property
    def expert_params(self) -> int:
        """Parameters of one routed or shared expert; 0 in a dense layer."""
        return count_params(self.feed_forward(self.experts.ffn)) if self.experts is not None else 0

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of one layer."""
        return self.experts.num * self.expert_params if self.experts is not None else 0

    def ffn_params(self) -> int:
        """Return the parameters of a layer's feed-forward, router included."""
        if self.experts is None:
            return count_params(self.feed_forward(self.ffn))
        return (self.experts.num + self.experts.shared) * self.expert_params + self.router_params

    def active_ffn_params(self) -> int:
        """Return the parameters of a layer's feed-forward that are used for each token."""
        if self.experts is None:
            return self.ffn_params()
        return (self.experts.top_k + self.experts.shared) * self.expert_params + self.router_params

    def layer_params(self) -> int:
        """Return the parameters of one decoder layer with its norms."""
        of_heads = 2 * self.head_dim * self.qk_norm if self.latent is None else 0
        norms = 2 * self.norm_params + of_heads
        return count_params(self.attention) + self.ffn_params() + norms

    @property
    def num_params(self) -> int:
        """All parameters, tied ones counted once."""
        layers = sum(self.of_layer(i).layer_params() for i in range(self.layers))
        tables = self.vocab * (1 if self.tied else 2) + self.positions
        return layers + tables * self.dim + self.norm_params

    # -- FLOPs
    def layer_flops_per_token(self, seq: int, *, causal: bool = False) -> tuple[int, int]:
        """Return one layer's forward FLOPs per token: (matrix products, attention core)."""
        attention = sum(matrix.numel for matrix in self.attention)
        products = 2 * (attention + self.active_ffn_params())
        return products, 4 * seq * self.q_dim // (2 if causal else 1)

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs per token of the output projection."""
        return 2 * self.dim * self.vocab


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


# -- Hugging Face configs
def read_config(path: Path) -> dict[str, Any]:
    """Return a ``config.json`` as a dict.

    transformers gives a missing key its default, so a slip would plan another model.

    **Raises** ConfigError where a size is neither null nor a whole number above 0.
    """
    try:
        config = read_json(path)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"model: {path}: expected a Hugging Face config with the key model_type")
    if len(config) > _MAX_KEYS or max(map(len, config)) > _MAX_KEYS:
        raise ConfigError(f"model: {path}: expected at most {_MAX_KEYS} keys, of such a length")
    for name in sorted(_SIZES & config.keys()):
        if config[name] is not None and not _is_size(config[name]):
            raise ConfigError(
                f"model: {path}: {name}: expected a whole number above 0, got {shown(config[name])}"
            )
    return config


def shape_from_config(config: Mapping[str, object]) -> DecoderShape:
    """Return the shape of the ``config.json`` of a Llama-like or GPT-2 model.

    **Raises** ConfigError for an unknown family, or a size that is missing or not above 0.
    """

    def size(name: str, default: int | None = None) -> int:
        value = default if config.get(name) is None else config[name]
        if isinstance(value, int) and _is_size(value):
            return value
        raise ConfigError(f"config.json: {name} must be a positive integer, got {value!r}")

    family = str(config.get("model_type", ""))
    if family not in _FAMILIES:
        known = f"{', '.join(_FAMILIES)}{did_you_mean(family, _FAMILIES)}"
        raise ConfigError(f"config.json: model_type is {family!r}, known are {known}")
    if family == "gpt2":
        sizes = (size(name) for name in ("n_layer", "n_embd", "n_head", "vocab_size"))
        return gpt_shape(*sizes, positions=size("n_positions"))
    dim, heads, ffn = map(size, ("hidden_size", "num_attention_heads", "intermediate_size"))
    experts = None
    if family == "mixtral":
        num, top_k = size("num_local_experts"), size("num_experts_per_tok")
        if top_k > num:
            raise ConfigError(
                "config.json: num_experts_per_tok must be at most num_local_experts "
                f"{num}, got {top_k}"
            )
        experts = Experts(num, top_k, ffn)
    return DecoderShape(
        layers=size("num_hidden_layers"),
        dim=dim,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", dim // heads),
        ffn=ffn,
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family == "gemma")),
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
        qk_norm=family == "qwen3",
        experts=experts,
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
