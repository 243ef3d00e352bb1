"""Context parallelism: each rank computes part of every sequence.

Note [Attention is replaced during a cut]
All layers of a decoder except attention see one token at a time. While a sequence is cut, a
function of ours replaces `torch.nn.functional.scaled_dot_product_attention`. Calls with queries and
keys of this rank's part are computed over the whole sequence, in any module. The end of the cut
restores torch's function. torch's own `context_parallel` does the same. A mode of torch
(`TorchFunctionMode`) would patch nothing global, but is not active in `Tensor.backward()`, where
checkpointed blocks are recomputed. A block in which no such call was seen raises: otherwise a rank
would silently attend to its own part only.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from shardwise.axes import Axes
from shardwise.comm.exchange import Exchange
from shardwise.engine.api import find_engine
from shardwise.errors import ConfigError
from shardwise.mesh import axis_of
from shardwise.parallel.attention import AttentionCall, Method, attend
from shardwise.parallel.sequences import SequenceCut, TokenSpan, cut_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

_ATTENTION = "scaled_dot_product_attention"
_TORCHS = F.scaled_dot_product_attention
_MARK = "computes_parts"  # marks our function, as other libraries replace torch's too


class ContextParallel:
    """A model whose sequences are cut over ``axes["cp"]``; `stats()` counts attention's traffic.

    ``method`` is "gather", "heads" or "ring": see Note [Gather, heads or ring] in attention.py.

    **Raises** ConfigError for another method, or a mesh without an axis "cp".
    """

    def __init__(
        self, model: nn.Module, axes: Axes | DeviceMesh, method: Method = "gather"
    ) -> None:
        if method not in get_args(Method):
            raise ConfigError(
                f"method={method!r}: expected one of {', '.join(map(repr, get_args(Method)))}"
            )
        if isinstance(axes, DeviceMesh) and "cp" not in (axes.mesh_dim_names or ()):
            raise ConfigError(f"mesh: its axes {axes.mesh_dim_names} name no 'cp'")
        self.model = model
        self.method = method
        # The same object in all cuts, because compiled code has a guard on it.
        self._function = torch.compiler.disable(self._over_parts)
        setattr(self._function, _MARK, True)
        self.exchange = Exchange(axis_of(axes["cp"], 0, "cp"), "(sequence)")
        # On the module, so that stats() finds it; all contexts of a model share its traffic.
        first = model.__dict__.setdefault("context_exchange", self.exchange)
        self.exchange.traffic = first.traffic

    @contextmanager
    def cut(
        self, *tensors: Tensor, dim: int = 1, documents: Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield this rank's parts of tensors, and the positions of their tokens, for one step.

        ``tensors`` are whole and the same on all ranks of the axis: token ids, shifted labels, any
        tensor with T tokens along ``dim``. The last yielded tensor is int64 [1, t]: each token's
        position in its document, for position embeddings. ``documents`` are the lengths of packed
        documents, in order; attention does not cross them. Run forward and backward inside; outside
        the model computes whole sequences. Use `mean_loss` for the loss, since ranks may have
        different numbers of tokens.

        **Cost** copies only, on an axis of one rank without documents.

        **Raises** ConfigError for tensors of different lengths, for a model whose gradients are not
        summed over the axis, inside another cut, and at the end if no attention was computed.
        """
        if is_cut():
            raise ConfigError(
                "cut(): a sequence is cut already, and attention can be computed over one at a "
                "time; end that cut first (models over the same axes can share one)"
            )
        cut = self._cut_of(tensors, dim, documents)
        self._check_sums()
        places, starts = _places(cut.spans[self.exchange.axis.rank], tensors[0].device)
        positions = (places - starts)[None]
        if cut.num_ranks == 1:
            parts = tensors
        else:
            parts = tuple(tensor.index_select(dim, places) for tensor in tensors)
        if cut.num_ranks == 1 and len(cut.documents) == 1:
            yield (*parts, positions)
            return
        self._current = cut
        self._seen = False  # no attention over parts was computed yet
        with mock.patch.object(F, _ATTENTION, self._function):
            yield (*parts, positions)
        if not self._seen and len(places):
            raise ConfigError(
                f"cut(): no attention over parts of {len(places)} tokens was computed inside, so "
                "what was computed saw this rank's part only. Call the model inside; attention "
                "must be torch.nn.functional.scaled_dot_product_attention"
            )

    def _over_parts(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention instead of torch's function, which is restored during the call."""
        call = AttentionCall(*args, **kwargs)
        cut = self._current
        queries = call.query.shape[-2]
        keys = call.key.shape[-2]
        local_tokens = cut.counts[self.exchange.axis.rank]
        with mock.patch.object(F, _ATTENTION, _TORCHS):
            if {queries, keys} != {local_tokens}:
                if queries == local_tokens and keys in cut.counts:
                    raise ConfigError(
                        f"attention: from {local_tokens} tokens, this rank's part, to {keys} keys, "
                        "as many as another rank's part has: that rank would take them for its "
                        "part. Give the keys another length (one more that a mask hides)"
                    )
                return _TORCHS(*args, **kwargs)  # other inputs: an image, or a whole sequence
            self._seen = True
            return attend(call, cut, self.exchange, self.method)

    def _cut_of(
        self, tensors: Sequence[Tensor], dim: int, documents: Sequence[int] | None
    ) -> SequenceCut:
        if not tensors:
            raise ConfigError("cut(): expected the tensors that have a sequence, such as token ids")
        lengths = [tensor.shape[dim] for tensor in tensors]
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"cut(): along dim {dim} the tensors have {lengths} tokens, not one number"
            )
        return cut_of(lengths[0], self.exchange.axis.size, documents)

    def _check_sums(self) -> None:
        engine = find_engine(self.model)
        if engine is None:
            return
        peers = dist.get_process_group_ranks(self.exchange.axis.group)
        if not set(peers) <= set(engine.comm.axes.mesh.mesh.flatten().tolist()):
            raise ConfigError(
                f"model: its gradients are not summed over the axis 'cp' (ranks {peers}), whose "
                "ranks see different tokens; shard it over the same axes: shard(model, mesh=axes)"
            )


def is_cut() -> bool:
    """Return True inside a `ContextParallel.cut`."""
    return hasattr(F.scaled_dot_product_attention, _MARK)


def _places(spans: Sequence[TokenSpan], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's position in the whole sequence, and its document's first position."""
    numbers = [(span.lo, span.hi - span.lo, span.document) for span in spans]
    first, lengths, documents = torch.tensor(numbers, dtype=torch.int64).view(-1, 3).unbind(1)
    ends = lengths.cumsum(0)  # of each span, in the rank's order
    skipped = (first - ends + lengths).repeat_interleave(lengths)  # tokens of other ranks before
    places = torch.arange(len(skipped)) + skipped
    return places.to(device), documents.repeat_interleave(lengths).to(device)
