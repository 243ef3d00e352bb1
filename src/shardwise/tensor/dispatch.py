"""Operations on sharded tensors: the cases of Note [What a ShardTensor answers].

Note [Why DTensor's dispatch is bypassed]
DTensor derives placements for every argument of every call. For a fused AdamW on a few hundred
parameters that costs 5 times the step on plain tensors. All ShardTensors of an elementwise call
have the same cut, so `__torch_function__` passes the local tensors straight to the kernel.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardError
from shardwise.tensor.cut import GATHER_SITE, Cut, CutMismatch
from shardwise.tensor.elements import set_elements
from shardwise.tensor.gathered_step import running_step
from shardwise.tensor.operations import (
    ELEMENTWISE,
    ELEMENTWISE_LISTS,
    FACTORIES,
    KERNELS,
    LIKE,
    NORMS,
    PRODUCTS,
    RANDOM,
    REDUCTIONS,
    RESHAPES,
    swaps_dim_with_itself,
)
from shardwise.tensor.refusals import refusal
from shardwise.tensor.tensor_base import (
    Operation,
    ShardTensorBase,
    alias_of,
    is_replicated,
    locals_of,
    owner_of_elements,
)
from shardwise.tensor.totals import norm, norms_of_list, reduce
from shardwise.tensor.whole_view import GatheredCopy, WholeView


def draw(call: Operation) -> object:
    """Draw the whole tensor and keep this rank's slice, in place or as a new tensor.

    Sharded probabilities are gathered.
    """
    tensor = call.args[0]
    if not isinstance(tensor, ShardTensorBase):
        return call.run(_full)
    call = Operation(call.func, call.name, (tensor, *map(_full, call.args[1:])), call.kwargs)
    full = torch.empty(tensor._cut.shape, dtype=tensor.dtype, device=tensor.device)
    whole = call.func(full, *call.args[1:], **call.kwargs)
    assert isinstance(whole, torch.Tensor)
    drawn = tensor._cut.slice_of(whole)
    if call.name in LIKE:
        return tensor.wrap(drawn.detach().clone(), tensor._cut, None, drawn.requires_grad)
    tensor._local_tensor.copy_(drawn)
    torch.autograd.graph.increment_version(tensor._local_tensor)  # marks full copies stale
    return tensor


def in_full(value: Any) -> Any:
    """Replace ShardTensors by full tensors; for parameters by autograd's leaf or a view of it."""
    if isinstance(value, ShardTensorBase):
        owner = owner_of_elements(value)
        if owner is None:
            raise refusal("this operation", [value])
        if not owner.in_use() and (not torch.is_grad_enabled() or _is_outside_graph(value)):
            return value.full_tensor()
        full = owner.use_full()
        return full if value.requires_grad else full.detach()  # frozen: not in the graph
    if isinstance(value, list | tuple) and any(isinstance(v, ShardTensorBase) for v in value):
        return [in_full(v) for v in value]
    return value


def _is_outside_graph(value: ShardTensorBase) -> bool:
    """Tell whether a tensor is in no graph, so that a gathered copy may replace it."""
    owner = value._owner
    if value.requires_grad or owner is None or value._cut.outer is not None:
        return False
    return owner.sharded is not value or owner.full.dtype == value.dtype


def into_leaf(value: Any) -> Any:
    """Return autograd's leaf for an input of ``backward(inputs=)``."""
    if not isinstance(value, ShardTensorBase):
        return value
    if value._owner is None or value._owner.sharded is not value:
        raise refusal("backward(inputs=[...])", [value])
    return value._owner.full


def check_conversion(param: Any, converted: Any) -> bool:
    """Check a conversion by ``Module._apply`` (``model.to``, ``.half()``), which loses the unit."""
    owner = getattr(param, "_owner", None)
    if owner is not None and getattr(converted, "_owner", None) is not owner:
        raise ShardError(
            f"parameter '{owner.name}': the dtype or device of a sharded model cannot be changed. "
            "Do that before shard(); the dtype to compute in is shard(precision=...)"
        )
    return True


def set_property(call: Operation, name: str) -> None:
    """Assign ``requires_grad`` (the full parameter follows) or ``data``."""
    tensor, value = call.args
    if name == "data":
        _assign_data(tensor, value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        call.run()
    if name == "requires_grad" and tensor._owner is not None and tensor._owner.sharded is tensor:
        tensor._owner.set_requires_grad(bool(value))


def _assign_data(tensor: ShardTensorBase, value: torch.Tensor) -> None:
    """Assign ``data``; see Note [Assignment of data]."""
    owner = tensor._owner
    if owner is not None and owner.sharded is tensor:
        owner.assign(value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ShardError(
            f".data of a ShardTensor of shape {tuple(tensor.shape)} {tensor.dtype} was to become "
            f"{tuple(value.shape)} {value.dtype}; make a new tensor instead"
        )
    if isinstance(value, ShardTensorBase) and value._cut.matches(tensor._cut):
        made = alias_of(value)
        set_elements(tensor, made._local_tensor)
        tensor._owner = made._owner
        return
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    set_elements(tensor, tensor._cut.slice_of(whole.detach()))
    tensor._owner = None


# -- the table of runners, by the operation's name
# A runner returns NotImplemented for a call it cannot run.
Runner = Callable[[Operation], object]


def answer(call: Operation) -> object:
    """Run or refuse a function that has sharded tensors among its arguments.

    A name is in one row of the table only, so the order of rows does not matter. A function without
    a row, or whose runner returns NotImplemented, is one of whole tensors.
    """
    run = _RUNNERS.get(call.name)
    try:
        made = NotImplemented if run is None else run(call)
    except CutMismatch:  # on all ranks, before anything is sent or written
        if running_step() is None:
            raise
        made = NotImplemented
    return _run_whole(call) if made is NotImplemented else made


def _run_whole(call: Operation) -> object:
    """Run a function of whole tensors on replicated tensors or on the full parameters."""
    shards = call.shards
    if is_replicated(shards):
        return _noting_aliases(_run_replicated(call), shards)
    if running_step() is not None:
        return _run_gathered(call)
    if (
        call.is_in_place
        or "out" in call.kwargs
        or any(owner_of_elements(t) is None for t in shards)
    ):
        raise refusal(call.name, shards)
    return run_in_full(call)


def _noting_aliases(result: object, shards: Sequence[ShardTensorBase]) -> object:
    """Note results over the memory of parameters, see Note [Assignment of data]."""
    for made in result if isinstance(result, list | tuple) else (result,):
        if isinstance(made, torch.Tensor) and made._base is not None:
            for owner in (tensor._owner for tensor in shards if tensor._owner is not None):
                owner.note_alias(made)
    return result


def _run_replicated(call: Operation) -> object:
    """Run a function on the local tensors, which are whole; refuse one that would reshape them."""
    if call.name in RESHAPES:
        if swaps_dim_with_itself(call.name, call.args):
            return call.args[0]  # Shampoo of pytorch_optimizer: grad.transpose_(0, 0)
        raise ShardError(
            f"{call.name} on a ShardTensor of shape {call.shards[0]._cut.shape}: the shape and "
            "memory of a sharded model's tensors stay; write values with copy_, or use the form "
            "that returns a new tensor"
        )
    out = call.kwargs.get("out")
    if not isinstance(out, ShardTensorBase):
        return call.run(locals_of)
    made = torch.empty(out._cut.local_shape, dtype=out.dtype, device=out.device)
    kwargs = {**call.kwargs, "out": made}
    result = Operation(call.func, call.name, call.args, kwargs).run(locals_of)
    if result is not made:  # NotImplemented, of an operator
        return result
    _check_out(call, made.shape)
    out._local_tensor.copy_(made)
    return out


def _check_out(call: Operation, shape: Sequence[int]) -> None:
    """Refuse ``out=`` of another shape, which torch would resize."""
    out = call.kwargs["out"]
    if tuple(shape) != out._cut.shape:
        raise ShardError(
            f"{call.name} of shape {tuple(shape)} with out= a ShardTensor of shape "
            f"{out._cut.shape}: the shape of a sharded tensor cannot be changed"
        )


def run_in_full(call: Operation) -> object:
    """Run a function on full tensors; refuse if a write would be lost.

    A write is lost if the function writes a full tensor (``inplace=True``). A view that it returns
    outside a forward pass, through which the caller may write, becomes a `WholeView`.
    """
    shards, args = call.shards, call.args
    if "out" in call.kwargs:
        raise refusal(f"{call.name} with out=", shards)
    place = _place_of_inplace(call.func)
    given = args[place] if place is not None and place < len(args) else call.kwargs.get("inplace")
    if given is True:  # refuse before it writes
        raise refusal(f"{call.name}, in place,", shards)
    kwargs = {key: in_full(value) for key, value in call.kwargs.items()}
    full = Operation(call.func, call.name, tuple(map(in_full, args)), kwargs)
    fulls = [t for t in full.values if isinstance(t, torch.Tensor)]
    before = [(t, t._version) for t in fulls if not t.is_inference()]
    result = full.run()
    if any(t._version != version for t, version in before):
        raise refusal(f"{call.name}, in place,", shards)
    if any(t._owner and t._owner.in_use() for t in shards):
        return result
    return _through_views(call, full, result)


@torch.no_grad()
def _run_gathered(call: Operation) -> object:
    """Run a function on whole tensors; see Note [Gathering for an optimizer]."""
    wholes: dict[int, tuple[ShardTensorBase, torch.Tensor]] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, ShardTensorBase):
            if id(value) not in wholes:
                wholes[id(value)] = value, value.full_tensor()
            return wholes[id(value)][1]
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, list | tuple) and any(isinstance(v, DTensor) for v in value):
            return type(value)(map(whole, value))
        return value

    kwargs = {key: whole(value) for key, value in call.kwargs.items()}
    full = Operation(call.func, call.name, tuple(map(whole, call.args)), kwargs)
    step = running_step()
    assert step is not None
    step.note(call.name, sum(gathered.nbytes for _, gathered in wholes.values()))
    before = {key: gathered._version for key, (_, gathered) in wholes.items()}
    result = full.run()
    by_schema = set(map(id, _written_by_schema(full)))
    written = [
        (shard, gathered)
        for key, (shard, gathered) in wholes.items()
        if gathered._version != before[key] or id(gathered) in by_schema
    ]
    for shard, gathered in written:
        if gathered.shape != shard.shape:
            raise refusal(f"{call.name}, which changes its shape,", [shard])
        shard._local_tensor.copy_(shard._cut.slice_of(gathered))
    if call.args and isinstance(call.args[0], list | tuple) and call.is_in_place:
        return call.args[0]
    for shard, gathered in written:
        if gathered is result:
            return shard
    return _through_views(call, full, result)


def _written_by_schema(call: Operation) -> Iterator[object]:
    """Yield the arguments that an operator writes; versions do not count what kernels write."""
    schema = getattr(getattr(call.func, "default", call.func), "_schema", None)
    if schema is not None:
        names = [argument.name for argument in schema.arguments]
        values = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        for argument in schema.arguments:
            value = values.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from value if isinstance(value, list | tuple) else [value]


def _through_views(call: Operation, full: Operation, result: object) -> object:
    """Make results that are memory of full tensors write through to the shards, or refuse them."""
    sources = call.shards
    copies: dict[int, GatheredCopy | None] = {}
    for source, whole in zip(call.values, full.values, strict=True):
        if not isinstance(source, ShardTensorBase):
            continue
        assert isinstance(whole, torch.Tensor)
        is_copy = not torch.is_grad_enabled() or _is_outside_graph(source)
        address = whole.untyped_storage().data_ptr()
        copies[address] = GatheredCopy(alias_of(source), whole) if is_copy else None

    def through(made: Any) -> Any:
        if isinstance(made, list | tuple):
            members = [through(member) for member in made]
            return made if all(map(operator.is_, members, made)) else type(made)(members)
        if type(made).__module__ == "numpy" and hasattr(made, "flags"):
            made.flags.writeable = False  # a write to it would be lost
        if not isinstance(made, torch.Tensor) or made.requires_grad or not made.numel():
            return made
        if made.layout != torch.strided:
            return made
        address = made.untyped_storage().data_ptr()
        if address not in copies:
            return made
        copy = copies[address]
        if copy is None:
            raise refusal(f"{call.name} (a view, which may be written)", sources)
        return WholeView.of(made, copy)

    return through(result)


@cache
def _place_of_inplace(func: Callable[..., object]) -> int | None:
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None  # a builtin, which has no such flag
    return names.index("inplace") if "inplace" in names else None


def _run_lists(call: Operation) -> object:
    """Run an elementwise function of lists of tensors (foreach, fused) on the local tensors."""
    leads, name = call.args[0], call.name
    args = [_locals_of_list(value, leads, name) for value in call.args]
    kwargs = {key: _locals_of_list(value, leads, name) for key, value in call.kwargs.items()}
    result = call.func(*args, **kwargs)
    if name.startswith("_fused_") or any(type(t) is not torch.Tensor for t in args[0]):
        # torch does not count the changes of fused kernels and of tensor subclasses.
        torch.autograd.graph.increment_version(
            [t._local_tensor for t in leads if isinstance(t, ShardTensorBase)]
        )
    if isinstance(result, list | tuple) and not name.endswith("_"):
        return [
            like.wrap(made, like._cut) if isinstance(like, ShardTensorBase) else made
            for made, like in zip(result, leads, strict=True)
        ]
    return leads if name.endswith("_") else result


_NUMBERS = ("alpha", "value")  # arguments that torch takes as numbers, or as tensors of no dims


def _run_local(call: Operation) -> object:
    """Run an elementwise function on the local tensors; wrap new results."""
    shards, args, kwargs = call.shards, call.args, call.kwargs
    cut = shards[0]._cut
    if call.name == "where" and len(args) == 1:
        if is_replicated(shards):
            return call.run(locals_of)
        return NotImplemented
    if call.name in ("to", "type_as") and args[0] is not shards[0]:
        # a plain tensor takes the dtype of a sharded one
        return call.func(*locals_of(args), **kwargs)
    writes = args[0] if call.is_in_place else kwargs.get("out", shards[0])
    if not isinstance(writes, ShardTensorBase):
        return _run_into(call, writes, cut)
    if isinstance(kwargs.get("out"), ShardTensorBase):
        inputs = [*args, *(value for key, value in kwargs.items() if key != "out")]
        shapes = [value.shape for value in inputs if isinstance(value, torch.Tensor)]
        _check_out(call, torch.broadcast_shapes(*shapes))
    if any(isinstance(kwargs.get(key), ShardTensorBase) for key in _NUMBERS):
        whole = {key: _full(value) if key in _NUMBERS else value for key, value in kwargs.items()}
        call = Operation(call.func, call.name, args, whole)
    result = call.run(lambda value: _operand(value, cut, call.name))
    if isinstance(args[0], ShardTensorBase) and result is args[0]._local_tensor:
        return args[0]
    if isinstance(result, torch.Tensor) and tuple(result.shape) == cut.local_shape:
        return kwargs["out"] if "out" in kwargs else shards[0].wrap(result, cut)
    return result


def _run_into(call: Operation, into: object, cut: Cut) -> object:
    """Run an elementwise function that writes a tensor other than a ShardTensor.

    A DTensor with the same cut (torchao's state) gets this rank's elements. Any other tensor is
    whole and gets whole values.
    """
    if not isinstance(into, DTensor):
        return call.run(_full)
    call.run(lambda value: _operand(value, cut, call.name))
    return into


def _full(value: object) -> object:
    """Return the whole of a sharded tensor; for a parameter autograd's leaf."""
    if not isinstance(value, ShardTensorBase):
        return value
    if value._cut.is_replicated and not torch.is_grad_enabled():
        return value._local_tensor
    return in_full(value) if value._owner is not None else value.full_tensor()


def _convert(call: Operation) -> object:
    """Run ``to`` without the index of a CPU; torch would copy to ``cpu:0``, the same memory."""

    def plain(value: object) -> object:
        is_indexed = isinstance(value, str | torch.device) and str(value).startswith("cpu:")
        return torch.device("cpu") if is_indexed else value

    kwargs = {key: plain(value) for key, value in call.kwargs.items()}
    return _run_local(Operation(call.func, call.name, tuple(map(plain, call.args)), kwargs))


def _detach(call: Operation) -> ShardTensorBase:
    """Return another tensor of the same elements and the same owner."""
    tensor: ShardTensorBase = call.args[0]
    return alias_of(tensor)


def _view_as(call: Operation) -> object:
    """View a tensor in its present shape, or a plain tensor in a sharded one's shape."""
    viewed, like = call.args
    if not isinstance(viewed, ShardTensorBase):
        return viewed.view(like.shape)
    is_same = viewed._cut.layout is not None and like.shape == viewed.shape
    return _detach(call) if is_same else NotImplemented


def _set_requires_grad(call: Operation) -> object:
    """Freeze or thaw a tensor; the full parameter follows."""
    tensor = call.args[0]
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.requires_grad_(*call.args, **call.kwargs)
    if tensor._owner is not None and tensor._owner.sharded is tensor:
        tensor._owner.set_requires_grad(tensor.requires_grad)
    return tensor


def _operand(value: Any, cut: Cut, name: str) -> Any:
    if isinstance(value, ShardTensorBase) and value._cut.is_replicated and cut.is_replicated:
        return value._local_tensor
    if cut.is_replicated and not isinstance(value, DTensor):
        return value
    if isinstance(value, ShardTensorBase):
        if value._cut is not cut and not value._cut.matches(cut):
            raise CutMismatch(
                f"{name}: ShardTensors of shapes {cut.shape} and {value._cut.shape} have "
                "different cuts, so a rank lacks elements of one of them; use full_tensor()"
            )
        return value._local_tensor
    if isinstance(value, DTensor):  # torch's own, which a loader made "like" a parameter
        has_same_cut = value.device_mesh == cut.mesh and value.placements == cut.placements
        return value._local_tensor if has_same_cut else cut.slice_of(value.full_tensor())
    if isinstance(value, torch.Tensor):
        return value.reshape(()) if value.numel() == 1 else cut.slice_of(value)
    return value


def _locals_of_list(value: Any, leads: Sequence[Any], name: str) -> Any:
    """Return the local tensors of a list argument; return other arguments unchanged."""
    if not isinstance(value, list | tuple):
        return value
    if value is leads or len(value) != len(leads):
        return [v._local_tensor if isinstance(v, ShardTensorBase) else v for v in value]
    members: list[object] = []
    for item, lead in zip(value, leads, strict=True):
        if isinstance(item, ShardTensorBase):
            if isinstance(lead, ShardTensorBase) and item._cut is lead._cut:
                members.append(item._local_tensor)
                continue
        elif isinstance(item, torch.Tensor) and item.dim() == 0:
            members.append(item)
            continue
        if isinstance(lead, ShardTensorBase) and isinstance(item, torch.Tensor):
            if isinstance(item, ShardTensorBase) and item._cut is lead._cut:
                members.append(item._local_tensor)
            else:
                members.append(_operand(item, lead._cut, name))
        elif isinstance(item, ShardTensorBase) and name.startswith("_fused_"):
            raise refusal(f"{name} into a plain tensor", [item])
        else:
            members.append(_full(item))
    return members


def _unscale(call: Operation) -> None:
    """Unscale gradients (torch.amp.GradScaler); share the overflow flag with every rank."""
    tensors, found_inf, inv_scale = call.args
    call.func([locals_of(t) for t in tensors], found_inf, inv_scale)
    cuts = [t._cut for t in tensors if isinstance(t, ShardTensorBase)]
    axes = {id(a.group): (c.comm, a) for c in cuts for a in (*c.comm.axes.all, *c.outer_axes)}
    for comm, axis in axes.values():
        found_inf.copy_(comm.max(found_inf, axis, GATHER_SITE))


def _make_new(call: Operation) -> object:
    """Make a new tensor: with the same cut if it has the sharded one's shape, else plain."""
    like, args = call.shards[0], call.args
    size = args[1] if len(args) > 1 else call.kwargs.get("size")
    if isinstance(size, tuple | list) and tuple(size) == like._cut.shape:
        made = call.func(like._local_tensor, like._cut.local_shape, *args[2:], **call.kwargs)
        assert isinstance(made, torch.Tensor)
        return like.wrap(made, like._cut)
    return call.func(like._local_tensor, *args[1:], **call.kwargs)


def _multiply(call: Operation) -> object:
    """Multiply a column by a row; it is elementwise, as the sum has one term."""
    shards = call.shards
    if call.kwargs or is_replicated(shards):
        return NotImplemented
    left, right = call.args
    if min(left.ndim, right.ndim) < 2 or left.shape[-1] != 1 or right.shape[-2] != 1:
        return NotImplemented
    if tuple(torch.broadcast_shapes(left.shape, right.shape)) != shards[0]._cut.shape:
        return NotImplemented
    return _run_local(Operation(torch.mul, "mul", call.args))


def _fill_masked(call: Operation) -> object:
    """Assign a number where a mask of the same cut is true."""
    tensor, mask, value = call.args
    if not isinstance(tensor, ShardTensorBase) or not isinstance(mask, ShardTensorBase):
        return NotImplemented
    is_plain = not isinstance(value, torch.Tensor) or (
        value.ndim == 0 and not isinstance(value, ShardTensorBase)
    )
    has_same_cut = mask.dtype == torch.bool and mask._cut.matches(tensor._cut)
    if not is_plain or not has_same_cut or is_replicated(call.shards):
        return NotImplemented
    tensor._local_tensor[mask._local_tensor] = value
    return None


_BLOCK = 256  # elements of a block, fixed in bitsandbytes


def _run_kernel(call: Operation) -> object:
    """Run a kernel of bitsandbytes on this rank's elements; blocks begin at its slice.

    Return NotImplemented if it takes the norm of the whole update (LAMB, LARS, ``max_unorm``), or
    has state of another shape than the parameter's, which is whole on every rank (AdEMAMix).
    """
    shards = call.shards
    takes_norm = call.name == "optimizer_update_32bit" and call.args[5] is not None
    param, state = call.args[2:4]
    if not is_replicated(shards) and (takes_norm or state.shape != param.shape):
        return NotImplemented
    numel = shards[0]._local_tensor.numel()
    if numel == 0:
        torch.autograd.graph.increment_version([t._local_tensor for t in shards])
        return None
    schema = call.func.default._schema  # type: ignore[attr-defined]
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, locals_of(call.args), strict=False)), **call.kwargs}
    for scales in ("absmax1", "absmax2"):  # one per block; the slice has fewer blocks
        if given.get(scales) is not None:
            given[scales] = given[scales][: -(-numel // _BLOCK)]
    result = call.func(**{key: locals_of(value) for key, value in given.items()})
    torch.autograd.graph.increment_version([t._local_tensor for t in shards])
    return result


def _norm(call: Operation) -> object:
    """Return a norm; gather 16-bit tensors for a step that gathers, as their parts are rounded."""
    is_rounded = running_step() is not None and call.shards[0].dtype.itemsize < 4
    return NotImplemented if is_rounded else norm(call)


_ROWS: tuple[tuple[Runner, Iterable[str]], ...] = (
    (_run_local, ELEMENTWISE),
    (_run_lists, ELEMENTWISE_LISTS),
    (draw, RANDOM | LIKE),
    (_run_kernel, KERNELS),
    (norms_of_list, ("_foreach_norm",)),
    (_norm, NORMS),
    (reduce, REDUCTIONS),
    (_unscale, ("_amp_foreach_non_finite_check_and_unscale_",)),
    (_make_new, FACTORIES),
    (_multiply, PRODUCTS),
    (_fill_masked, ("__setitem__",)),
    (_detach, ("detach", "alias")),
    (_view_as, ("view_as",)),
    (_set_requires_grad, ("requires_grad_",)),
    (_convert, ("to",)),
)
_RUNNERS = {name: run for run, names in _ROWS for name in names}
assert len(_RUNNERS) == sum(len(list(names)) for _, names in _ROWS), "a name with two rows"
