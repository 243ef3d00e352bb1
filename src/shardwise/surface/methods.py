"""FSDPModule: the methods of a module that `shard()` or `fully_shard` made a unit for.

torch's class is a base, so ``isinstance`` checks against it hold. All setters are here. A setter
replaces the frozen settings of units; all ranks call it, between passes. A setting that a unit of
`shard()` does not support raises ConfigError (`model.ShardState`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from shardwise.engine.model import noted_state
from shardwise.errors import ConfigError
from shardwise.surface.packed import Packed, PackedSum
from shardwise.surface.state import ModuleState, end_passes
from shardwise.unit.unit import Unit


class Handle(UnshardHandle):
    """The result of ``unshard(async_op=True)``."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait until the modules hold the full parameters."""
        for unit in self._units:
            unit.finish_unshard()
            unit.show()
        self._units = ()


_Any = TypeVar("_Any")


class FSDPModule(TorchFSDPModule):
    """A module with units; see torch's documentation of the methods."""

    _orig_cls_mro_index = 3  # FSDP<Cls>, this class, torch's, Cls

    def _get_fsdp_state(self) -> Any:
        return noted_state(self)

    # -- parameters
    def reshard(self) -> None:
        """Free this module's full parameters and register the sharded ones; not recursive."""
        self._get_fsdp_state().reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's full parameters and register them; not recursive.

        With `shard()` they stay until `reshard`, over any number of passes.
        """
        state: ModuleState = self._get_fsdp_state()
        handle = Handle(tuple(state.start_unshard()))
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forget a pass that raised, with its gradients; call it on the root."""
        state: ModuleState = self._get_fsdp_state()
        if state.engine is None:
            return
        if state.engine.units[0] is not state.units[0]:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        state.engine.reset()
        for unit_state in _states_of(self, True):
            unit_state.reshard()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        self._get_fsdp_state().adopt()
        return result

    # -- when gradients are reduced, and parameters freed
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Pass False if more passes follow: kept gradients then stay even at a window's end.

        Without kept gradients every backward pass still completes its reductions.
        """
        for state in _states_of(self, True):
            state.change(awaits_end=not is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in the next backward passes, or keep them on this rank."""
        for state in _states_of(self, recurse):
            state.change(keeps_grads=not requires_gradient_sync)
            if requires_gradient_sync:
                state.change_sums(all_reduces=True)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum gradients over replicas (HSDP), or over shards only for now."""
        for state in _states_of(self, recurse):
            sums_at_once = not state.units[0].settings.full_between_calls  # units of shard()
            replicates = any(unit.comm.axes.replicate is not None for unit in state.units)
            if sums_at_once and replicates and not requires_all_reduce:
                raise ConfigError(
                    "set_requires_all_reduce(): shard() sums over shards and replicas at once; "
                    "keep gradients on the ranks until the last micro-batch, with "
                    "accumulate(model, last=False) or set_requires_gradient_sync(False)"
                )
            state.change_sums(all_reduces=requires_all_reduce or sums_at_once)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free full parameters after forward, or keep them for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in _states_of(self, recurse):
            state.free_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free full parameters after backward, or keep them for the next forward of a window.

        True keeps the stage's behavior: at stages 0 to 2 full parameters stay.
        """
        for state in _states_of(self, recurse):
            state.change_stage(frees_after_backward=reshard_after_backward and state.frees)
            state.change(stays_full=not reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather full parameters for backward, or not (embeddings do not need them)."""
        self._get_fsdp_state().change(reads_in_backward=unshard_in_backward)

    # -- prefetch
    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules' parameters while this one runs forward."""
        self._get_fsdp_state().change(forward_prefetch=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules' parameters while this one's backward runs."""
        self._get_fsdp_state().change(backward_prefetch=_units_of(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the current stream wait for the optimizer's event; gathers follow that stream."""
        stream = torch.get_device_module(self._get_fsdp_state().device).current_stream()
        if hasattr(stream, "wait_event"):
            stream.wait_event(event)

    # -- how gradients are reduced
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by ``factor`` instead of their number."""
        self._get_fsdp_state().change_sums(divisor=factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept it: collectives only sum, and the sums are divided afterwards."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce missing gradients as zeros, for ranks that use different parameters."""
        for state in _states_of(self, recurse):
            state.change_sums(zero_fill=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Limit the reductions in flight; the largest limit of any module counts."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for state in _states_of(self, recurse):
            state.allow_in_flight(max_input_buffers)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather with the caller's own collective."""
        _state_of_one_unit(self, "set_custom_all_gather").units[0].gather.transport = Packed(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with the caller's own collective.

        **Raises** ConfigError for encoded gradients.
        """
        state = _state_of_one_unit(self, "set_custom_reduce_scatter")
        unit = state.units[0]
        if unit.precision.reduce_coding is not None:
            raise ConfigError(
                f"set_custom_reduce_scatter(): gradients of unit '{unit.name}' are encoded "
                f"(reduce={unit.precision.reduce!r}), and encoded ones are summed in rank order "
                "by Shardwise. Give a dtype as reduce="
            )
        state.change_sums(user_reduce_scatter=PackedSum(comm))

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Call ``hook`` with the reduced gradients, one flat tensor per dtype of the unit."""
        state = _state_of_one_unit(self, "set_all_reduce_hook")
        if stream is not None and state.units[0].comm.axes.replicate is not None:
            raise ValueError("stream cannot be set when using native HSDP")
        runs = hook if stream is None else _on_stream(hook, stream)
        state.change_sums(after_reduce=runs)

    # -- torch 2.15 and later
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Let passes keep gradients as set, until `finalize_backward` reduces them."""
        self.set_is_last_backward(not enabled)

    def finalize_backward(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Reduce the gradients that backward passes have kept on this rank; call it on the root."""
        state: ModuleState = self._get_fsdp_state()
        if state.engine is not None:
            end_passes(state.engine)
        return Handle(()) if async_op else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Raise NotImplementedError if True and parameters are freed: their memory is not kept."""
        if keep and any(state.frees for state in _states_of(self, recurse)):
            raise NotImplementedError(
                "set_keep_unsharded_storage(True): full parameters get new memory at each gather; "
                "keep them full instead, with set_reshard_after_forward(False) and "
                "set_reshard_after_backward(False)"
            )

    # -- accepted without effect
    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accept it: reductions and gathers share a process group."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept it, except together with the caller's own collectives."""
        for unit in self._get_fsdp_state().units:
            custom_gather = getattr(unit.gather.transport, "all_gather", None)
            if custom_gather or unit.grads.sum_settings.user_reduce_scatter:
                raise AssertionError(
                    "cannot call set_allocate_memory_from_process_group() after "
                    "set_custom_all_gather() or set_custom_reduce_scatter(): those allocate"
                )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accept it: buffers come from torch's allocator."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept it: every gather runs in the background."""


def make_subclass(cls: Any, base: type, name: str, members: dict[str, Any]) -> Any:
    """Return a subclass of ``base`` and ``cls`` that instances of ``cls`` can be given.

    Python compares the memory layouts of two classes by the first base that adds a ``__dict__``. If
    in ``cls`` this base inherits from `abc.ABC` or `typing.Generic`, as a mixin before nn.Module
    may, the subclass gets a first base of the same origin.
    """
    index = base._orig_cls_mro_index  # type: ignore[attr-defined]
    of_dict = cls
    while of_dict.__base__.__dictoffset__:
        of_dict = of_dict.__base__
    origin = of_dict.__base__
    if origin is object:
        return type(cls)(name, (base, cls), members)
    given = {"__orig_bases__": (Generic[_Any],)} if origin is Generic else {}
    root = type(origin)(f"_{name}Layout", (origin,), given)
    members = {**members, "_orig_cls_mro_index": index + 1}
    return type(cls)(name, (root, base, cls), members)


# Functions, not methods: a method could shadow a name of the user's class.
def _states_of(module: Any, recurse: bool) -> Iterator[ModuleState]:
    for inner in module.modules() if recurse else [module]:
        if isinstance(inner, FSDPModule):
            yield inner._get_fsdp_state()


def _state_of_one_unit(module: FSDPModule, method: str) -> ModuleState:
    state: ModuleState = module._get_fsdp_state()
    if len(state.units) > 1:
        raise ValueError(
            f"{method} is not supported with multiple param groups (from per-param mesh via "
            "shard_placement_fn): it would be ambiguous across groups with different meshes."
        )
    return state


def _units_of(modules: Iterable[Any]) -> tuple[Unit, ...]:
    units: list[Unit] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        units += module._get_fsdp_state().units
    return tuple(units)


def _on_stream(hook: Callable[[torch.Tensor], Any], stream: Any) -> Callable[[torch.Tensor], None]:
    """Return the hook wrapped to run on ``stream``, in order with the current stream."""

    def run(values: torch.Tensor) -> None:
        streams = torch.get_device_module(values.device)
        current = streams.current_stream()
        stream.wait_stream(current)
        with streams.stream(stream):
            hook(values)
        current.wait_stream(stream)

    return run
