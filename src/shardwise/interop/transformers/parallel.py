"""Parallelism of transformers' models: tensors and experts by their own plans, and sequences.

Note [Attention over parts of sequences]
transformers makes masks from its inputs. The positions of a part of a sequence jump from its head
to its tail, which look to transformers like packed documents. So a model gets an attention of this
package's: transformers' "sdpa" for whole sequences, and no mask for parts.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import TensorParallelLayer, apply_tensor_parallelism
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from shardwise.axes import Axes
from shardwise.errors import ConfigError
from shardwise.parallel.context import is_cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

_ATTENTION = "shardwise_sdpa"
_SUMMED = "replicated_with_grad_allreduce"


def parallelize(model: PreTrainedModel, axes: Axes) -> PreTrainedModel:
    """Cut a model over ``axes["tp"]`` and spread its experts over ``axes["ep"]``; return it.

    By the model's own ``tp_plan`` and ``ep_plan``, with transformers' own layers; with ``cp`` it
    computes what `parallel.ContextParallel` cuts. Call it before `shardwise.shard`, whose
    ``Units(experts=)`` names the experts where ``ep`` is not 1. Ranks of one tensor-parallel group
    get the same batch. Axes of one rank change nothing. Weights that several modules have (tied
    embeddings) stay whole on every rank.

    **State** parameters become DTensors, in place; modules get another ``forward``.

    **Raises** ConfigError for a model that has no such plan, or whose plan does not fit the axes.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model: a {type(model).__name__} has no plan; use torch's parallelize_module()"
        )
    if axes.cp > 1:
        _attend_over_parts(model)
    if axes.tp == 1 and axes.ep == 1:
        return model
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"model: parameter '{name}' is a DTensor already; call parallelize() once, on a "
                "model that is whole, before it is sharded"
            )
    try:
        config = DistributedConfig(tp_size=axes.tp, ep_size=axes.ep, fsdp_size=axes.data.size())
        tp_plan, ep_plan, _ = model._resolve_parallel_plans(config)
    except ValueError as error:
        raise ConfigError(f"model: {type(model).__name__} over {axes}: {error}") from error
    summed = [name for name, style in tp_plan.items() if style == _SUMMED]
    excluded = {*summed, *_tied(model)}
    others = {name: style for name, style in tp_plan.items() if name not in excluded}
    if axes.tp > 1:
        _install(_SummedGrads(), model, axes["tp"], summed)
        apply_tensor_parallelism(model, axes["tp"], others)
    if axes.ep > 1:
        apply_expert_parallelism(model, axes["ep"], axes["tp"], ep_plan)
    return model


def _tied(model: nn.Module) -> set[str]:
    """Return the names of parameters that several modules share, and of these modules."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        places.setdefault(param, []).append(name)
    names = {name for names in places.values() if len(names) > 1 for name in names}
    return names | {name.rpartition(".")[0] for name in names}


def _install(
    style: TensorParallelLayer, model: nn.Module, mesh: DeviceMesh, names: list[str]
) -> None:
    params = dict(model.named_parameters())
    for name in names:
        path, _, attribute = name.rpartition(".")
        if name in params:
            style.shard_param(model.get_submodule(path), attribute, mesh)
        else:
            style.install_forward(model.get_submodule(name), mesh)


class _SummedGrads(TensorParallelLayer):
    """Parameters that every rank has in full, with gradients of the rank's own heads.

    transformers sums ``param.grad`` in a hook after each backward pass, so an accumulation window
    would sum earlier micro-batches again. Here they are DTensors whose gradients are partial sums,
    which are summed once, in the reduction.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Make a DTensor of one parameter."""
        plain = module._parameters[param]
        if plain is not None:
            placed = distribute_tensor(plain, mesh, [Replicate()], src_data_rank=None)
            module._parameters[param] = nn.Parameter(placed, requires_grad=plain.requires_grad)

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        """Let the layer read local tensors, whose gradients are partial sums."""
        return _local_params(module)


@contextmanager
def _local_params(module: nn.Module) -> Iterator[None]:
    before = dict(module._parameters)
    for name, param in before.items():
        if isinstance(param, DTensor):
            local: Any = param.to_local(grad_placements=[Partial()])
            module._parameters[name] = local
    try:
        yield
    finally:
        module._parameters.update(before)


def _attend_over_parts(model: PreTrainedModel) -> None:
    """Let a model compute sequences within `cut()`. See Note [Attention over parts of ...].

    **Raises** ConfigError for a model whose attention is not "sdpa".
    """
    chosen = model.config._attn_implementation
    if chosen not in ("sdpa", _ATTENTION):
        raise ConfigError(
            f"model: its attention is {chosen!r}; context parallelism takes 'sdpa': "
            "model.set_attn_implementation('sdpa')"
        )
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, _mask)
    model.set_attn_implementation(_ATTENTION)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if not is_cut():
        return sdpa_mask(*args, **kwargs)
    if kwargs.get("local_size") is not None:
        raise ConfigError(
            "model: it has layers of sliding windows or chunks, which can't be computed over a "
            "sequence that is cut; use cp=1"
        )
    given = kwargs.get("attention_mask")
    if given is not None and not bool(given.all()):
        raise ConfigError(
            "attention_mask: it masks tokens of a sequence that is cut. Fill sequences up on the "
            "right, with labels of -100 there, and leave the mask out; pack documents by "
            "cut(documents=)"
        )
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not is_cut() or attention_mask is not None:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return whole
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        scale=scaling,
        is_causal=causal,  # even for one token, which transformers takes for the last one
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None
