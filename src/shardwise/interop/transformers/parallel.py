"""Tensor and expert parallelism by the plans that models of transformers bring along."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import TensorParallelLayer, apply_tensor_parallelism

from shardwise.axes import Axes
from shardwise.errors import ConfigError
from shardwise.interop.transformers.context import attend_over_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

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
        attend_over_parts(model)
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
    apart = {*summed, *_tied(model)}
    others = {name: style for name, style in tp_plan.items() if name not in apart}
    if axes.tp > 1:
        _install(_SummedGrads(), model, axes["tp"], summed)
        apply_tensor_parallelism(model, axes["tp"], others)
    if axes.ep > 1:
        apply_expert_parallelism(model, axes["ep"], axes["tp"], ep_plan)
    return model


def _tied(model: nn.Module) -> set[str]:
    """Return the names of parameters that several modules have, and of these modules."""
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
    """Parameters that every rank has, each with the gradients of its own heads.

    transformers sums ``param.grad`` in a hook after each backward pass, so what an accumulation
    window has summed so far is summed again with every micro-batch. As DTensors whose gradients are
    partial sums, these are completed once, when they are reduced.
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
