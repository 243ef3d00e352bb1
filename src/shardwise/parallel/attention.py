"""Attention over a sequence that is sharded over ranks: communication and computation.

Note [Gather, heads or ring]
``gather``: each rank receives the keys and values of all ranks, and computes its queries. It sends
``2 x kv_heads`` vectors per token to each other rank, and holds those of the whole sequence.
``heads`` (DeepSpeed-Ulysses, arXiv:2309.14509): each rank receives the whole sequence for its share
of the heads, and sends the results back. It sends each of ``2 x heads + 2 x kv_heads`` vectors per
token to one rank, which is fewer bytes from some N on; N must divide the heads. ``ring``: torch's
ring attention with keys and values of one rank at a time; ring.py has its limits.

B rows, T tokens of the whole sequence, t of this rank, H heads, K key/value heads, E head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.exchange import Exchange
from shardwise.errors import ConfigError
from shardwise.parallel.ring import by_ring, check_ring
from shardwise.parallel.sequences import SequenceCut

Method = Literal["gather", "heads", "ring"]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def over(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
        """Compute attention of other tensors with the same options, by torch's kernels."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout_p,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    def with_one_head(self) -> "AttentionCall":
        """Return [B, t, E] as [B, 1, t, E], and a mask [B, T, T] likewise."""
        mask = self.attn_mask
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        query, key, value = (x.unsqueeze(1) for x in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, attn_mask=mask)


def attend(call: AttentionCall, cut: SequenceCut, exchange: Exchange, method: Method) -> Tensor:
    """Return this rank's part of attention over the whole sequence.

    **Shapes** query [B, H, t, E], key and value [B, K, t, E] -> [B, H, t, E]; of one head also
    [B, t, E]. ``attn_mask``, if given, is of the whole sequence: [..., T or 1, T].

    **Cost** see Note [Gather, heads or ring]; the gradient exchanges as much.

    **Raises** ConfigError for heads that N does not divide, a mask of another shape or beside
    ``is_causal``, and DTensors.
    """
    if call.query.ndim == 3:
        return attend(call.with_one_head(), cut, exchange, method).squeeze(1)
    _check(call, cut)
    if exchange.axis.size == 1:
        return _of_spans(call, cut, 0, call.query, call.key, call.value)
    return _METHODS[method](call, cut, exchange)


def _by_gather(call: AttentionCall, cut: SequenceCut, exchange: Exchange) -> Tensor:
    key_dim = call.key.shape[-1]
    pairs = torch.cat([call.key, call.value], dim=-1).permute(2, 0, 1, 3)  # [t, B, K, E + E]
    max_count = max(cut.counts)
    gathered = exchange.all_gather(F.pad(pairs, (0, 0) * 3 + (0, max_count - len(pairs))))
    whole = _in_sequence(gathered.flatten(0, 1), cut, max_count).permute(1, 2, 0, 3)
    key, value = whole.split([key_dim, whole.shape[-1] - key_dim], dim=-1)
    return _of_spans(call, cut, exchange.axis.rank, call.query, key, value)


def _by_heads(call: AttentionCall, cut: SequenceCut, exchange: Exchange) -> Tensor:
    num_ranks = exchange.axis.size
    key, value = _repeated(call, num_ranks)
    heads = call.query.shape[1]
    local_tokens = call.query.shape[2]
    parts = [_by_rank(x, num_ranks) for x in (call.query, key, value)]
    mine = [local_tokens] * num_ranks
    rows = exchange.all_to_all(torch.cat(parts, dim=-1).flatten(0, 1), mine, cut.counts)
    whole = _in_sequence(rows, cut)  # [T, B, channels of this rank's heads]
    query, key, value = (
        x.unflatten(-1, (-1, of.shape[-1])).permute(1, 2, 0, 3)
        for x, of in zip(
            whole.split([p.shape[-1] for p in parts], dim=-1),
            (call.query, key, value),
            strict=True,
        )
    )
    mask = call.attn_mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
        mask = mask.chunk(num_ranks, dim=-3)[exchange.axis.rank]
    mixed = _of_spans(replace(call, attn_mask=mask), cut.on_one_rank, 0, query, key, value)
    rows = _by_ranks_of(mixed.permute(2, 0, 1, 3).flatten(2), cut)
    back = exchange.all_to_all(rows, cut.counts, mine)
    back = back.view(num_ranks, local_tokens, len(call.query), heads // num_ranks, value.shape[-1])
    return back.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _by_ring(call: AttentionCall, cut: SequenceCut, exchange: Exchange) -> Tensor:
    check_ring(cut, call.is_causal, call.attn_mask is not None, call.dropout_p)
    return by_ring(call.query, call.key, call.value, call.scale, exchange)


_METHODS: dict[str, Callable[[AttentionCall, SequenceCut, Exchange], Tensor]] = {
    "gather": _by_gather,
    "heads": _by_heads,
    "ring": _by_ring,
}


def _of_spans(
    call: AttentionCall, cut: SequenceCut, rank: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attend from a rank's queries to keys and values of the whole sequence.

    No mask is made if a kernel needs none: a span sees its document up to the span's end, so its
    causal triangle is aligned to the lower right.
    """
    spans = cut.spans[rank]
    if not spans:  # no token; the graph still joins the exchanges of backward
        return query[..., :1] * key.sum() + value.narrow(-2, 0, 0)[:, :1]
    if call.attn_mask is not None or not (call.is_causal or len(cut.documents) > 1):
        mask = call.attn_mask
        if mask is not None and mask.shape[-2] != 1 and cut.num_ranks > 1:
            mask = mask.index_select(-2, torch.tensor(cut.tokens(rank), device=mask.device))
        return call.over(query, key, value, mask)
    starts = {span.document for span in spans}
    keys = _documents(key, cut, starts)
    values = _documents(value, cut, starts)
    mixed = []
    queries = query.split([span.hi - span.lo for span in spans], dim=-2)
    for part, span in zip(queries, spans, strict=True):
        key = keys[span.document]
        value = values[span.document]
        if not call.is_causal:
            mixed.append(call.over(part, key, value))
            continue
        seen = span.hi - span.document
        triangle = _triangle(part.shape[-2], seen)
        mixed.append(call.over(part, key.narrow(-2, 0, seen), value.narrow(-2, 0, seen), triangle))
    return torch.cat(mixed, dim=-2)


def _triangle(num_queries: int, num_keys: int) -> Any:
    """Return the causal bias in which the last query sees all keys.

    It is a tensor subclass, which cannot be made inside a dispatch mode of torch, such as that of
    `counting` or of selective checkpointing.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return causal_lower_right(num_queries, num_keys)
    with _disable_current_modes():
        return causal_lower_right(num_queries, num_keys)


def _documents(x: Tensor, cut: SequenceCut, starts: set[int]) -> dict[int, Tensor]:
    """Return the keys or values of each document that begins in ``starts``."""
    parts = {}
    start = 0
    for part in x.split(list(cut.documents), dim=-2):
        if start in starts:
            parts[start] = part
        start += part.shape[-2]
    return parts


def _in_sequence(rows: Tensor, cut: SequenceCut, padded_count: int | None = None) -> Tensor:
    """Reorder the rows of all ranks from rank order to the order of the sequence.

    With ``padded_count``, every rank has that many rows, padded at the end. Only splits and one
    copy are used, because the gradient of an index is a sum, and that of a slice fills the other
    rows with zeros.
    """
    lengths = []
    places = []
    for rank in range(cut.num_ranks):
        for span in cut.spans[rank]:
            lengths.append(span.hi - span.lo)
            places.append(span.lo)
        padding = 0 if padded_count is None else padded_count - cut.counts[rank]
        if padding:
            lengths.append(padding)
            places.append(-1)
    parts = rows.split(lengths)
    order = sorted((place, i) for i, place in enumerate(places) if place >= 0)
    return torch.cat([parts[i] for _, i in order])


def _by_ranks_of(rows: Tensor, cut: SequenceCut) -> Tensor:
    """Reorder rows from the order of the sequence to rank order."""
    spans = [span for mine in cut.spans for span in mine]
    places = sorted(range(len(spans)), key=lambda i: spans[i].lo)
    parts = rows.split([spans[i].hi - spans[i].lo for i in places])
    by_span = dict(zip(places, parts, strict=True))
    return torch.cat([by_span[i] for i in range(len(spans))])


def _by_rank(x: Tensor, num_ranks: int) -> Tensor:
    """Return [B, H, t, E] as [N, t, B, H / N x E]."""
    return x.unflatten(1, (num_ranks, -1)).permute(1, 3, 0, 2, 4).flatten(3)


def _repeated(call: AttentionCall, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, with heads repeated until N divides their number."""
    heads = call.query.shape[1]
    kv_heads = call.key.shape[1]
    if heads % num_ranks:
        raise ConfigError(
            f"context parallelism by heads: cp={num_ranks} does not divide the {heads} heads that "
            "a rank has; choose a cp that does, or method='gather'"
        )
    times = next(
        n
        for n in range(1, heads // kv_heads + 1)
        if not (heads // kv_heads) % n and not (kv_heads * n) % num_ranks
    )
    if times == 1:
        return call.key, call.value
    return call.key.repeat_interleave(times, dim=1), call.value.repeat_interleave(times, dim=1)


def _check(call: AttentionCall, cut: SequenceCut) -> None:
    if any(isinstance(x, DTensor) for x in (call.query, call.key, call.value, call.attn_mask)):
        raise ConfigError(
            "attention: over a sequence that is cut it takes tensors, and got a DTensor. Let the "
            "layers before it return local ones (use_local_output=True, the default)"
        )
    if call.query.ndim != 4:
        raise ConfigError(
            f"attention: a query of shape {list(call.query.shape)}; over a sequence that is cut it "
            "is [B, H, t, E] or, of one head, [B, t, E]"
        )
    if call.attn_mask is None:
        return
    if call.is_causal:
        raise ConfigError(
            "attention: attn_mask and is_causal=True are both given, and torch's kernels take one; "
            "pass only the mask"
        )
    if len(cut.documents) > 1:
        raise ConfigError(
            "attention: attn_mask and documents= are both given; pass one of them (a mask can "
            "separate documents too)"
        )
    shape: Sequence[int] = call.attn_mask.shape
    if shape[-1] != cut.length or shape[-2] not in (1, cut.length):
        raise ConfigError(
            f"attention: the mask has the shape {list(shape)}, but a mask of a sequence that is "
            f"cut covers all its tokens: [..., {cut.length}, {cut.length}]. Leave it out if "
            "attention is causal (is_causal=True)"
        )
