"""Records every operation of a run on fake tensors: bytes alive, and costs by class.

Note [What fake tensors cannot show]
A fake kernel allocates its outputs and nothing else. What real kernels allocate beside them for the
time of the call was found by laying the log beside the allocator trace of
``torch.profiler(profile_memory=True)``. In `_WORKSPACE` are those that grow with the tensors. Left
out are scratch buffers of the CPU's kernels alone: those of its flash attention (at most about
1 MiB per thread), and packed operands of bfloat16 products on some processors; also the state of
the random generator that checkpointing keeps (5 KB per layer, in host memory).

Note [Costs]
``moved_bytes`` are all inputs and outputs of a kernel once; an expanded tensor counts its storage,
a lookup what it looks up. Views and uninitialised memory cost nothing. FLOPs are those of
``torch.utils.flop_counter``, which counts the full square of an attention: half of it where the
kernel is causal, since it leaves out what the mask hides. Its backward counts twice the forward, as
in papers and efficiencies, without what a flash kernel computes again. The counter does not know
grouped products, which mixtures of experts run: each row is multiplied by the matrix of its group,
however they divide.

Note [Which bytes are logits]
Those allocated from the begin of the output head's forward, through the loss, to the end of the
head's backward, but for gradients of parameters and the gradient of the head's input. The head is
the last module in forward order that owns a matrix and is not an embedding; where it owns none
itself (a product with the embedding's weight) the region begins where the root's forward ends.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise.engine.hooks import register_hooks
from shardwise.engine.tree import tensors_in
from shardwise.plan.model.tape import Cost, CostKind
from shardwise.plan.sizes import DtypeName

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default

_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"}
_FREE |= {"new_empty_strided", "set_", "resize_", "_local_scalar_dense"}
_READS_SOME = {"embedding", "index", "index_select", "gather"}  # not all of their first argument
_WRITES_ONLY = {"fill_", "zero_", "copy_", "bernoulli_", "normal_", "uniform_"}


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Return the name under which costs of a dtype are booked; whole numbers count as int8."""
    return _DTYPE_NAMES.get(dtype, "int8")


class Change(NamedTuple):
    """Bytes that came (positive) or went; ``serial`` numbers the storage."""

    serial: int
    num_bytes: int


@dataclass
class Life:
    """When a storage came and went, as places in the log of changes."""

    num_bytes: int
    born: int
    died: int | None = None


class _Rule(NamedTuple):
    """How an operation is booked; found once per operation."""

    name: str
    is_free: bool
    allocates: bool
    kind: CostKind
    flops: Callable[..., int] | None
    causal_at: int  # which argument says that a kernel leaves out what the mask hides; -1: none
    workspace: Callable[..., int] | None
    is_grouped: bool = False


class Tracker(TorchDispatchMode):
    """A mode above the fake one: sees every kernel, below autograd.

    ``log`` has every allocation and release of a storage in order, ``lives`` what became of each.
    Storages given to `own` or `take` are not booked. ``recomputes`` is true while a forward runs
    inside backward; ``at_switch`` is called before that changes.
    """

    def __init__(self, at_switch: Callable[[], None]) -> None:
        super().__init__()
        self.recomputes = False
        self._at_switch = at_switch
        self.log: list[Change] = []
        self.lives: list[Life] = []
        self._serials: dict[int, tuple[int, Any]] = {}  # by address, while alive
        self._foreign: dict[int, torch.UntypedStorage] = {}
        self._costs: dict[tuple[CostKind, DtypeName], list[int]] = {}
        self._rules: dict[Any, _Rule] = {}

    def own(self, tensor: torch.Tensor) -> int:
        """Leave a tensor's storage out of the log from now on; return its bytes, once."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._foreign:
            return 0
        self._foreign[storage._cdata] = storage
        return storage.nbytes()

    def serial_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, None where it is not booked."""
        entry = self._serials.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def take(self, tensor: torch.Tensor) -> None:
        """Stop booking a tensor's storage: its bytes are another's from now on."""
        self._serials.pop(tensor.untyped_storage()._cdata, None)

    @property
    def has_costs(self) -> bool:
        """Tell whether anything ran since costs were last taken."""
        return bool(self._costs)

    def take_costs(self) -> tuple[Cost, ...]:
        """Return the costs since the last call, by class and dtype."""
        costs, self._costs = self._costs, {}
        return tuple(Cost(*key, *costs[key]) for key in sorted(costs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on fake tensors and book it."""
        if func is _DEVICE:  # asked more often than all else is done
            return func(*args)
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _rule_of(func)
        if not rule.is_free:
            self._watch_for_recomputing()
        out = _grouped_mm(func, args, kwargs) if rule.is_grouped else func(*args, **kwargs)
        if rule.allocates:
            for tensor in _tensors(out):
                self._note(tensor)
        if rule.is_free:
            return out
        flops = rule.flops(*args, **kwargs, out_val=out) if rule.flops else 0
        if rule.causal_at >= 0:
            is_causal = [*args[rule.causal_at :], kwargs.get("is_causal", False)][0]
            flops //= 2 if is_causal else 1
        if rule.name.endswith("attention_backward") or "attention_for_cpu_backward" in rule.name:
            flops = flops * 4 // 5
        if rule.workspace is not None:
            self._note_workspace(rule.workspace(*args, **kwargs, out_val=out))
        self._add_cost(rule, flops, args, kwargs, out)
        return out

    def _watch_for_recomputing(self) -> None:
        # Backward itself runs without gradients; a checkpoint's forward inside it turns them on.
        recomputes = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        if recomputes != self.recomputes:
            self._at_switch()
            self.recomputes = recomputes

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._serials or address in self._foreign:
            return
        num_bytes = storage.nbytes()
        if not num_bytes:
            return
        serial = len(self.lives)
        self.lives.append(Life(num_bytes, len(self.log)))
        self.log.append(Change(serial, num_bytes))
        entry = (serial, weakref.ref(storage, lambda _: self._release(address, serial)))
        self._serials[address] = entry

    def _release(self, address: int, serial: int) -> None:
        entry = self._serials.get(address)
        if entry is None or entry[0] != serial:
            return
        del self._serials[address]
        self.lives[serial].died = len(self.log)
        self.log.append(Change(serial, -self.lives[serial].num_bytes))

    def _note_workspace(self, num_bytes: int) -> None:
        if not num_bytes:
            return
        serial, place = len(self.lives), len(self.log)
        self.lives.append(Life(num_bytes, place, place + 1))
        self.log += [Change(serial, num_bytes), Change(serial, -num_bytes)]

    def _add_cost(self, rule: _Rule, flops: int, args: Any, kwargs: Any, out: Any) -> None:
        inputs = list(_tensors((args, tuple(kwargs.values()))))
        outputs = list(_tensors(out))
        if rule.name in _READS_SOME:
            moved = 2 * _nbytes(outputs) + _nbytes(inputs[1:])
        elif rule.name in _WRITES_ONLY:
            moved = _nbytes(outputs) + _nbytes(inputs[1:])
        else:
            moved = _nbytes(inputs) + _nbytes(outputs)
        first = (outputs or inputs)[:1]
        dtype = dtype_name(first[0].dtype) if first else "int8"
        cost = self._costs.setdefault((rule.kind, dtype), [0, 0, 0])
        cost[0] += flops
        cost[1] += moved
        cost[2] += 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _nbytes(tensors: list[torch.Tensor]) -> int:
    """Sum the bytes that are read or written; an expanded tensor has those of its storage."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _rule_of(func: Any) -> _Rule:
    returns = func._schema.returns
    name = func._schema.name.removeprefix("aten::")
    aliases = [r.alias_info for r in returns]
    is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
    formula = flop_registry.get(_SAME_FLOPS.get(name, func._overloadpacket)) or _GROUPED.get(name)
    names = [argument.name for argument in func._schema.arguments]
    kind: CostKind = "memory"
    if formula is not None:
        kind = "attention" if "attention" in name else "matmul"
    return _Rule(
        name=name,
        is_free=is_view or name in _FREE or not returns,
        allocates=any(a is None for a in aliases),
        kind=kind,
        flops=formula,
        causal_at=names.index("is_causal") if kind == "attention" and "is_causal" in names else -1,
        workspace=_WORKSPACE.get(name),
        is_grouped=name == "_grouped_mm",
    )


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Run a grouped product: its fake kernel takes bfloat16 alone, the real ones other dtypes."""
    left, right, *rest = args
    if left.dtype == torch.bfloat16:
        out: torch.Tensor = func(*args, **kwargs)
        return out
    out = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *rest, **kwargs)
    return out.to(left.dtype)


def _grouped_flops(left: torch.Tensor, right: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """Count a product of which rows, columns or the summed dimension are cut into groups."""
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]


_GROUPED: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_flops,
    "transformers::grouped_mm_fallback": _grouped_flops,
    "transformers::grouped_mm_fallback_backward": lambda *args, **kwargs: 2 * _grouped_flops(*args),
}


# The CPU's flash kernels take the same arguments as the CUDA ones that have a formula.
_SAME_FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


_WORKSPACE: dict[str, Callable[..., int]] = {
    # One bool per element, to find rows that are all -inf.
    "_safe_softmax": lambda *args, out_val, **kwargs: out_val.numel(),
}


# -- the output head
class Head:
    """Finds the output head and the stretch of the log that is its and the loss's."""

    suspended = False

    def __init__(self, model: nn.Module, tracker: Tracker) -> None:
        self._tracker = tracker
        self._call = _HeadCall(None, None, None)
        self._handles = [
            handle
            for module in _outside_lists(model)
            if not isinstance(module, nn.Embedding)
            and any(p is not None and p.dim() == 2 for p in module._parameters.values())
            for handle in register_hooks(self, _Watched(module))
        ]

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def before_forward(self, unit: Any, args: Any, kwargs: Any) -> None:
        """Note where in the log the call begins, and when its backward will have ended."""
        if torch._C._current_graph_task_id() != -1:
            return
        call = self._call = _HeadCall(len(self._tracker.log), None, None)

        def at_end(grad: torch.Tensor) -> None:
            call.end, call.input_grad = len(self._tracker.log), self._tracker.serial_of(grad)

        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(at_end)

    def after_forward(self, unit: Any, output: Any) -> None:
        """Do nothing: the stretch continues through the loss."""

    def stretch(self, root_end: int, body_begin: int) -> tuple[int, int, int | None]:
        """Return begin and end in the log, and the one storage inside it without logits.

        ``root_end``, ``body_begin``: where the root's forward ended, and where the backward of
        another unit first began; they bound the stretch of a model without a head.
        """
        call = self._call
        if call.begin is None:
            return root_end, body_begin, None
        return call.begin, body_begin if call.end is None else call.end, call.input_grad


@dataclass(frozen=True)
class _Watched:
    module: nn.Module


@dataclass
class _HeadCall:
    """Places in the log: begin of forward, end of backward; and the gradient that leaves."""

    begin: int | None
    end: int | None
    input_grad: int | None


def _outside_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules outside of any ModuleList. Those inside one are the model's body."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outside_lists(child)
