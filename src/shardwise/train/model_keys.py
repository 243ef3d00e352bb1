"""Keys of a run that say what is trained, and over which kinds of parallelism it is spread."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from shardwise.axes import Axes
from shardwise.keys import key
from shardwise.plan.model.shapes import DecoderShape, Experts, llama_shape


class ModelKeys(BaseModel):
    """Hold the keys of the built-in decoder and of the degrees of parallelism."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dim: int = key(256, "Model", "width of the residual stream", gt=0)
    layers: int = key(4, "Model", "number of decoder blocks", gt=0)
    heads: int = key(8, "Model", "number of query heads", gt=0)
    kv_heads: int | None = key(None, "Model", "number of key/value heads; unset: as heads", gt=0)
    ffn_multiple: float = key(8 / 3, "Model", "hidden width of the SwiGLU over dim", gt=0)
    vocab: int | None = key(None, "Model", "vocabulary; unset: the tokenizer's size", gt=0)
    seq: int = key(256, "Model", "tokens in a window", gt=0)
    tied_head: bool = key(False, "Model", "share the embedding with the output head")
    dropout: float = key(
        0.0, "Model", "share of activations zeroed in training; 0 draws nothing", ge=0, lt=1
    )
    experts: int = key(0, "Experts", "experts of a layer; 0: a plain feed-forward", ge=0)
    experts_per_token: int = key(2, "Experts", "experts that each token is sent to", gt=0)
    expert_ffn_multiple: float | None = key(
        None, "Experts", "hidden width of an expert over dim; unset: ffn_multiple", gt=0
    )
    shared_experts: int = key(0, "Experts", "experts that every token goes through", ge=0)
    dense_layers: int = key(0, "Experts", "first layers without experts", ge=0)
    expert_scoring: Literal["softmax", "sigmoid"] = key(
        "softmax", "Experts", "how routers score experts: as Mixtral, or as DeepSeek-V3"
    )
    expert_balance: float = key(
        0.01, "Experts", "weight of the loss that keeps experts equally busy; 0: none", ge=0
    )
    expert_bias: bool = key(
        False, "Experts", "keep them equally busy by biases of the routers (DeepSeek-V3)"
    )

    dp_replicate: int = key(
        1, "Degrees", "groups of ranks that hold a full set of shards each (hybrid)", gt=0
    )
    dp_shard: int = key(-1, "Degrees", "ranks that share the state; -1: those that are left", ge=-1)
    ep: int = key(1, "Degrees", "ranks that share the experts, cut out of dp_shard x cp x tp", gt=0)
    tp: int = key(1, "Degrees", "ranks that share each layer (tensor parallelism)", gt=0)
    pp: int = key(1, "Degrees", "stages of a pipeline, of consecutive blocks each", gt=0)
    pp_schedule: Literal["1f1b", "gpipe"] = key(
        "1f1b", "Degrees", "the order of a pipeline's passes; accumulation is its micro-batches"
    )
    cp: int = key(1, "Degrees", "ranks that share each window (context parallelism)", gt=0)
    cp_method: Literal["gather", "heads", "ring"] = key(
        "gather", "Degrees", "how attention sees whole windows under cp"
    )

    @property
    def axes(self) -> Axes:
        """The degrees of parallelism."""
        return Axes(self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep)

    def shape(self, vocab: int) -> DecoderShape:
        """Return the shape of the run's decoder."""
        ffn = self._width(self.ffn_multiple)
        sizes = self.layers, self.dim, self.heads, self.kv_heads or self.heads, ffn, vocab
        shape = llama_shape(*sizes, tied=self.tied_head)
        if not self.experts:
            return shape
        experts = Experts(
            self.experts,
            self.experts_per_token,
            self._width(self.expert_ffn_multiple or self.ffn_multiple),
            shared=self.shared_experts,
            dense_layers=self.dense_layers,
            scoring=self.expert_scoring,
        )
        return replace(shape, experts=experts)

    def _width(self, multiple: float) -> int:
        return 32 * max(1, round(multiple * self.dim / 32))

    @model_validator(mode="after")
    def _check_sizes_together(self) -> Self:
        kv_heads = self.kv_heads or self.heads
        for name, size in (("heads", self.heads), ("kv_heads", kv_heads)):
            if size % self.tp:
                raise ValueError(f"tp: expected a divisor of {name} {size}, got {self.tp}")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token: expected at most experts {self.experts}, got "
                f"{self.experts_per_token}"
            )
        if self.experts % self.ep or (self.ep > 1 and not self.experts):
            raise ValueError(f"ep: expected a divisor of experts {self.experts}, got {self.ep}")
        if self.pp > self.layers:
            raise ValueError(f"pp: expected at most layers {self.layers}, got {self.pp}")
        if self.pp > 1 and self.experts and self.expert_balance:
            raise ValueError(
                "pp: stages hand on tokens alone, and not the loss of expert_balance; set "
                "expert_balance to 0, and expert_bias to true"
            )
        if self.seq % self.cp:
            raise ValueError(f"cp: expected a divisor of seq {self.seq}, got {self.cp}")
        if self.seq // self.cp % self.tp:
            part = f"seq {self.seq}" if self.cp == 1 else f"seq {self.seq} / cp {self.cp}"
            raise ValueError(f"tp: expected a divisor of {part}, got {self.tp}")
        if self.cp > 1:
            self._check_method()
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"heads: expected dim / heads to be a whole even number (rotary embeddings turn "
                f"pairs), got dim {self.dim} / heads {self.heads}"
            )
        if self.heads % kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads {self.heads}, got {kv_heads}")
        return self

    def _check_method(self) -> None:
        """Refuse what attention over parts of windows would refuse at the first step."""
        if self.cp_method == "heads" and self.heads // self.tp % self.cp:
            part = f"heads {self.heads}" if self.tp == 1 else f"heads {self.heads} / tp {self.tp}"
            raise ValueError(
                f"cp_method: 'heads' needs a cp that divides {part}, got {self.cp}; take 'gather'"
            )
        if self.cp_method == "ring" and (self.dropout or self.seq % (2 * self.cp)):
            why = "no dropout" if self.dropout else f"2 x cp {self.cp} to divide seq {self.seq}"
            raise ValueError(f"cp_method: 'ring' needs {why}; take 'gather'")
