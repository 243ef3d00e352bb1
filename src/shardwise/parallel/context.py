"""Context parallelism: each rank computes a part of every sequence.

Note [Attention is found where it is called]
All of a decoder but attention sees one token at a time. While a sequence is cut, the name
`torch.nn.functional.scaled_dot_product_attention` stands for a function of ours: calls whose
queries and keys are this rank's part are computed over the whole sequence, in whatever module they
are made. It is put back at the end. torch's own `context_parallel` does the same; a mode of torch
(`TorchFunctionMode`) would change nothing that others see, but is not active in
`Tensor.backward()`, where checkpointed blocks are computed again. A block in which no such call was
seen raises: else a rank would attend to its own part only, and train on without a word.
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
from shardwise.parallel.sequences import SequenceCut, Span, cut_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

_ATTENTION = "scaled_dot_product_attention"
_TORCHS = F.scaled_dot_product_attention
_OURS = "computes_parts"  # marks ours: others replace torch's function as well


class ContextParallel:
    """A model whose sequences are cut over ``axes["cp"]``; `stats()` counts what attention sends.

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
        self.model, self.method = model, method
        self._function = torch.compiler.disable(self._over_parts)  # one, as compiled code guards it
        setattr(self._function, _OURS, True)
        self.exchange = Exchange(axis_of(axes["cp"], 0, "cp"), "(sequence)")
        # A module's attribute, so that stats() finds it; another context of the model counts there.
        first = model.__dict__.setdefault("context_exchange", self.exchange)
        self.exchange.traffic = first.traffic

    @contextmanager
    def cut(
        self, *tensors: Tensor, dim: int = 1, documents: Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Give this rank's parts of tensors, and the positions of their tokens, for one step.

        ``tensors`` are the same on all ranks of the axis, and whole: token ids, labels that are
        shifted already, whatever has T tokens along ``dim``. The last one given is int64 [1, t]:
        each token's place in its document, for position embeddings. ``documents``: lengths of
        documents that are packed into the sequence, in order, none of which sees another. Forward
        and backward both belong inside; outside the model computes whole sequences. Take
        `mean_loss` for the loss, as ranks may have different numbers of tokens.

        **Cost** none but the copies where the axis has one rank and there are no documents.

        **Raises** ConfigError where lengths differ, where the model's gradients are not summed over
        the axis, inside of another cut, and at the end where no attention was computed.
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
            parts = tuple(each.index_select(dim, places) for each in tensors)
        if cut.num_ranks == 1 and len(cut.documents) == 1:
            yield (*parts, positions)
            return
        self._current, self._seen = cut, False
        with mock.patch.object(F, _ATTENTION, self._function):
            yield (*parts, positions)
        if not self._seen and len(places):
            raise ConfigError(
                f"cut(): no attention over parts of {len(places)} tokens was computed inside, so "
                "what was computed saw this rank's part only. Call the model inside; attention "
                "must be torch.nn.functional.scaled_dot_product_attention"
            )

    def _over_parts(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take the place of torch's function, which is in its own while it is computed."""
        call = AttentionCall(*args, **kwargs)
        cut, queries, keys = self._current, call.query.shape[-2], call.key.shape[-2]
        here = cut.counts[self.exchange.axis.rank]
        with mock.patch.object(F, _ATTENTION, _TORCHS):
            if {queries, keys} != {here}:
                if queries == here and keys in cut.counts:
                    raise ConfigError(
                        f"attention: from {here} tokens, this rank's part, to {keys} keys, as many "
                        "as another rank's part has: that rank would take them for its part. Give "
                        "the keys another length (one more that a mask hides)"
                    )
                return _TORCHS(*args, **kwargs)  # an image, a whole sequence that is looked at
            self._seen = True
            return attend(call, cut, self.exchange, self.method)

    def _cut_of(
        self, tensors: Sequence[Tensor], dim: int, documents: Sequence[int] | None
    ) -> SequenceCut:
        if not tensors:
            raise ConfigError("cut(): give it the tensors that have a sequence, such as token ids")
        lengths = [each.shape[dim] for each in tensors]
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
    """Tell whether this is inside a `ContextParallel.cut` of a sequence."""
    return hasattr(F.scaled_dot_product_attention, _OURS)


def _places(spans: Sequence[Span], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the place of each token in the whole sequence, and of its document's first one."""
    numbers = [(span.lo, span.hi - span.lo, span.document) for span in spans]
    first, lengths, documents = torch.tensor(numbers, dtype=torch.int64).view(-1, 3).unbind(1)
    here = lengths.cumsum(0)
    left_out = (first - here + lengths).repeat_interleave(lengths)
    places = torch.arange(len(left_out)) + left_out
    return places.to(device), documents.repeat_interleave(lengths).to(device)
