"""ShardTensor: the tensors of ``model.parameters()`` between steps.

Note [What a ShardTensor answers]
It has the parameter's global shape and dtype, and this rank's elements. An operation on it is
one of:

- elementwise (optimizers, EMA, clipping): run on this rank's elements, nothing sent;
- a reduction or norm of the whole tensor: completed over the ranks, so every rank has the result;
- a draw (``nn.init``, ``randn_like``): equal on every rank, each keeps its slice;
- writing one into a plain tensor: it is gathered first, as a plain tensor is whole;
- any other on a *parameter*: the full parameter takes its place, so a parameter used outside
  its module (weight decay in the loss, tied projections) is right, in autograd too;
- any other on other ShardTensors (gradients, optimizer state): a ShardError with the remedy.

So no operation returns this rank's part as if it were the whole tensor.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils

from shardwise.errors import ShardError
from shardwise.tensor.cut import Ragged
from shardwise.tensor.dispatch import (
    answer,
    check_conversion,
    draw,
    into_leaf,
    run_in_full,
    set_property,
)
from shardwise.tensor.draws import same_draws
from shardwise.tensor.elements import elements_of
from shardwise.tensor.inner import gather_whole
from shardwise.tensor.operations import (
    DRAWS,
    FULL_PROPERTIES,
    GRAD_FREE,
    LIKE,
    LOCAL_FACTS,
    METADATA,
)
from shardwise.tensor.refusals import check_reader
from shardwise.tensor.replaced import running_optimizer
from shardwise.tensor.tensor_base import Operation, ShardTensorBase


class ShardTensor(ShardTensorBase):
    """This rank's elements of a tensor that is cut over the shard axis.

    It is a DTensor. Its placement is ``Shard(0)`` with the ``rows`` layout (``Replicate()`` at
    stage 0) and `Ragged` with ``flat``. See Note [What a ShardTensor answers].
    """

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's elements, sharing memory, outside the autograd graph."""
        local = self._local_tensor.detach()
        if self._owner is not None:
            self._owner.note_alias(local)
        return local

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor as an ordinary one. Every rank of the shard axis must call it.

        **Cost** one all-gather of this tensor, and its full size in memory.
        """
        return gather_whole(self._local_tensor, self._cut)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """Return the whole tensor as a replicated DTensor; other placements are refused.

        torch's ``get_model_state_dict(full_state_dict=True)`` calls it. **Cost** as `full_tensor`.
        """
        if not placements or not all(p.is_replicate() for p in placements):
            raise ShardError(
                "redistribute: the unit decides the placement of a ShardTensor; use full_tensor()"
            )
        mesh = self._cut.mesh
        return DTensor.from_local(self.full_tensor(), mesh, placements, run_check=False)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement on each axis of the mesh; refused to an optimizer that would misread it.

        **Raises** ShardError where an optimizer that cuts or puts together tensors by itself reads
        a placement other than torch's.
        """
        placements = self._spec.placements
        if isinstance(placements[-1], Ragged):
            check_reader(self, sys._getframe(1))
        return placements

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's slice of the mean gradient; finishes reductions in flight."""
        owner = self._owner
        if owner is None or owner.sharded is not self:
            return self.__dict__.get("_plain_grad")
        return owner.gradient.read()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        owner = self._owner
        if owner is None or owner.sharded is not self:
            self.__dict__["_plain_grad"] = value
        else:
            owner.gradient.write(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __tensor_flatten__(self) -> Any:
        """Refuse to be traced: compiled code would treat it as a plain DTensor."""
        if torch._guards.TracingContext.try_get() is None:
            return super().__tensor_flatten__()
        optimizer = running_optimizer()
        what = "this function" if optimizer is None else f"{type(optimizer).__name__}.step()"
        raise ShardError(
            f"torch.compile of {what} over sharded parameters is not supported. Run it uncompiled: "
            'with torch.compiler.set_stance("force_eager"): optimizer.step()'
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Show this rank's elements; sends nothing."""
        cut = self._cut
        name = f"'{self._owner.name}', " if self._owner is not None else ""
        return (
            f"ShardTensor({name}shape={cut.shape}, dtype={self._local_tensor.dtype}, "
            f"elements [{cut.lo}, {cut.hi}) here: {self._local_tensor})"
        )

    def __format__(self, format_spec: str) -> str:
        """Show this rank's elements, also of a tensor with one element; sends nothing."""
        return repr(self) if not format_spec else super().__format__(format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardTensor":
        """Copy this rank's elements into a ShardTensor that no unit owns (e.g. for EMA)."""
        copied = ShardTensor.wrap(self._local_tensor.detach().clone(), self._cut)
        if isinstance(self, nn.Parameter):
            copied.requires_grad_(self.requires_grad)
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse: a pickled slice would load as if it were a parameter."""
        raise ShardError(
            "a ShardTensor holds this rank's slice only and cannot be pickled; pickle "
            "t.full_tensor(), or the state_dict() inside `with shardwise.gathered(model):`"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, as Note [What a ShardTensor answers] defines."""
        call = Operation(func, func.__name__, args, kwargs)
        if call.name in DRAWS:
            shards = call.shards
            if call.is_in_place or not any(t._owner and t._owner.in_use() for t in shards):
                with same_draws(shards[0]._cut, shards[0].device, call.kwargs.get("generator")):
                    return cls._answer(call)
        return cls._answer(call)

    @classmethod
    def _answer(cls, call: Operation) -> object:
        func, name, args = call.func, call.name, call.args
        if name == "__get__":
            call.name = name = func.__self__.__name__  # type: ignore[attr-defined]
            if name in LOCAL_FACTS:
                return func(elements_of(args[0]))
            if name == "data":  # torch 2.11 makes a plain DTensor of it
                return args[0].detach()
            if name not in FULL_PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return call.run()
        elif name in LOCAL_FACTS and isinstance(args[0], ShardTensorBase):
            return func(elements_of(args[0]))
        elif name == "__set__":
            set_property(call, func.__self__.__name__)  # type: ignore[attr-defined]
            return None
        elif name in METADATA and (name != "type" or not any((*args[1:], *call.kwargs.values()))):
            with torch._C.DisableTorchFunctionSubclass():
                return call.run()
        elif getattr(func, "__module__", "") == "torch.nn.init":  # which names all arguments
            tensor = call.kwargs["tensor"]
            others = {key: value for key, value in call.kwargs.items() if key != "tensor"}
            if name != "constant_":
                return draw(Operation(func, name, (tensor,), others))
            with torch.no_grad():
                return tensor.fill_(others["val"])
        elif name == "_has_compatible_shallow_copy_type":
            return check_conversion(*args)
        elif name in ("register_hook", "register_post_accumulate_grad_hook"):
            owner = args[0]._owner
            if name != "register_hook" and owner is not None and owner.sharded is args[0]:
                return owner.gradient.add_hook(*args[1:], **call.kwargs)
            raise ShardError(
                f"{name} on a ShardTensor: autograd does not see it, and the full parameter's "
                "gradient is this rank's alone; read p.grad after loss.backward(), or use "
                "register_post_accumulate_grad_hook on the parameter, which is called with the mean"
            )
        elif name in ("data_ptr", "storage") and args[0]._cut.is_replicated:
            return func(args[0]._local_tensor)
        elif name in ("data_ptr", "storage"):
            raise ShardError(
                f"{name} of a ShardTensor: each rank holds only a slice. To write whole tensors "
                "(safetensors, NumPy), take model.state_dict() inside "
                "`with shardwise.gathered(model):`; one tensor is t.full_tensor()"
            )
        elif func is torch.autograd.grad:
            raise ShardError(
                "torch.autograd.grad with respect to a sharded parameter would give this rank's "
                "gradient, not the mean over ranks; call loss.backward() and read p.grad"
            )
        elif func is torch.autograd.backward and call.kwargs.get("inputs") is not None:
            # torch dispatches on the classes of inputs since 2.11 (pytorch#171473).
            inputs = [into_leaf(tensor) for tensor in call.kwargs["inputs"]]
            return func(*args, **{**call.kwargs, "inputs": inputs})
        if name not in GRAD_FREE and not call.is_in_place:
            records = torch.is_grad_enabled() and name not in LIKE  # autograd does not record these
            owned = [(tensor, tensor._owner) for tensor in call.shards if tensor._owner is not None]
            if any((records and tensor.requires_grad) or by.in_use() for tensor, by in owned):
                return run_in_full(call)
        return answer(call)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the calls that reach ATen directly (``detach``, ``.data``, copies)."""
        return answer(Operation(func, func.overloadpacket.__name__, args, kwargs))


# torch.optim and clip_grad take their foreach paths only for types they know; DTensor registers
# itself in the same lists (torch/distributed/tensor/__init__.py).
for _types in (_torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if ShardTensor not in _types:
        _types.append(ShardTensor)
