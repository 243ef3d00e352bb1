"""The tracker of a run on fake tensors: bytes alive, and costs by class.

Note [What fake tensors cannot show]
A fake kernel allocates its outputs and nothing else. What real kernels allocate beside them for the
time of the call was found by laying the log beside the allocator trace of
``torch.profiler(profile_memory=True)``. Counted are the bools of a safe softmax, one per element,
which find rows that are all -inf. Left out are scratch buffers of the CPU's kernels alone: those of
its flash attention (at most about 1 MiB per thread), and packed operands of bfloat16 products on
some processors; also the state of the random generator that checkpointing keeps (5 KB per layer, in
host memory).

Note [Costs]
``moved_bytes`` are all inputs and outputs of a kernel once; an expanded tensor counts its storage,
a lookup what it looks up. Views and uninitialised memory cost nothing. FLOPs are those of
``torch.utils.flop_counter``, which counts the full square of an attention: half of it where the
kernel is causal, since it leaves out what the mask hides. Its backward counts twice the forward, as
in papers and efficiencies, without what a flash kernel computes again. The counter does not know
grouped products, which mixtures of experts run: each row is multiplied by the matrix of its group,
however they divide.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

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
# The CPU's flash kernels take the same arguments as the CUDA ones that have a formula.
_SAME_FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Return the name under which costs of a dtype are booked; whole numbers count as int8."""
    return _DTYPE_NAMES.get(dtype, "int8")


class StorageChange(NamedTuple):
    """Bytes that a storage allocated (positive) or freed; ``serial`` numbers the storage."""

    serial: int
    num_bytes: int


@dataclass
class Life:
    """The life of a storage, as places in the log; ``width`` is the tensor's last dim."""

    num_bytes: int
    width: int
    born: int
    died: int | None = None


@dataclass(frozen=True)
class _BookingRule:
    """The rule by which an operation is booked, cached per operation.

    ``causal_at`` is the place of the argument ``is_causal``, with which a kernel skips the masked
    half.
    """

    name: str
    is_free: bool
    allocates: bool
    kind: CostKind
    flops: Callable[..., int] | None
    causal_at: int | None


class Tracker(TorchDispatchMode):
    """A mode above the fake one: sees every kernel, below autograd.

    ``log`` has every allocation and release of a storage in order, ``lives`` the life of each.
    Storages given to `exclude` or `release` are not booked. ``recomputes`` is true while a forward
    runs inside backward; ``at_switch`` is called before that changes.
    """

    def __init__(self, at_switch: Callable[[], None]) -> None:
        super().__init__()
        self.recomputes = False
        self._at_switch = at_switch
        self.log: list[StorageChange] = []
        self.lives: list[Life] = []
        # By address, while alive.
        self._serials: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._foreign: dict[int, torch.UntypedStorage] = {}
        self._costs: dict[tuple[CostKind, DtypeName], list[int]] = {}
        self._rules: dict[OpOverload, _BookingRule] = {}

    def exclude(self, tensor: Tensor) -> int:
        """Leave a tensor's storage out of the log from now on; return its bytes, once."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._foreign:
            return 0
        self._foreign[storage._cdata] = storage
        return storage.nbytes()

    def serial_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, None where it is not booked."""
        entry = self._serials.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def release(self, tensor: Tensor) -> None:
        """Stop booking a tensor's storage, without booking a release."""
        self._serials.pop(tensor.untyped_storage()._cdata, None)

    @property
    def has_costs(self) -> bool:
        """True if an operation ran since the last call of `take_costs`."""
        return bool(self._costs)

    def take_costs(self) -> tuple[Cost, ...]:
        """Return the costs since the last call, by class and dtype."""
        costs, self._costs = self._costs, {}
        return tuple(Cost(*key, *costs[key]) for key in sorted(costs))

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation on fake tensors and book it."""
        if func is _DEVICE:  # more frequent than all other operations
            return func(*args)
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _rule_of(func)
        if not rule.is_free:
            self._watch_for_recomputing()
        is_grouped = rule.name == "_grouped_mm"
        out = _grouped_mm(func, args, kwargs) if is_grouped else func(*args, **kwargs)
        outputs = list(_tensors(out))
        for tensor in outputs if rule.allocates else ():
            self._book_allocation(tensor)
        if not rule.is_free:
            self._add_cost(rule, _flops_of(rule, args, kwargs, out), args, kwargs, outputs)
        return out

    def _watch_for_recomputing(self) -> None:
        # Backward itself runs without gradients; a checkpoint's forward inside it turns them on.
        recomputes = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        if recomputes != self.recomputes:
            self._at_switch()
            self.recomputes = recomputes

    def _book_allocation(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        num_bytes = storage.nbytes()
        if not num_bytes or address in self._serials or address in self._foreign:
            return
        serial = len(self.lives)
        width = tensor.shape[-1] if tensor.dim() else 0
        self.lives.append(Life(num_bytes, width, len(self.log)))
        self.log.append(StorageChange(serial, num_bytes))
        released = weakref.ref(storage, lambda _: self._book_release(address, serial))
        self._serials[address] = serial, released

    def _book_release(self, address: int, serial: int) -> None:
        if self._serials.get(address, (None,))[0] != serial:
            return
        del self._serials[address]
        self.lives[serial].died = len(self.log)
        self.log.append(StorageChange(serial, -self.lives[serial].num_bytes))

    def _add_cost(
        self,
        rule: _BookingRule,
        flops: int,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        outputs: list[Tensor],
    ) -> None:
        if rule.name == "_safe_softmax":  # see Note [What fake tensors cannot show]
            serial, place, num_bytes = len(self.lives), len(self.log), outputs[0].numel()
            self.lives.append(Life(num_bytes, 0, place, place + 1))
            self.log += [StorageChange(serial, num_bytes), StorageChange(serial, -num_bytes)]
        inputs = list(_tensors((*args, *kwargs.values())))
        if rule.name in _READS_SOME:
            moved = 2 * _nbytes(outputs) + _nbytes(inputs[1:])
        else:
            moved = _nbytes(outputs) + _nbytes(inputs[rule.name in _WRITES_ONLY :])
        first = (outputs or inputs)[:1]
        dtype = dtype_name(first[0].dtype) if first else "int8"
        cost = self._costs.setdefault((rule.kind, dtype), [0, 0, 0])
        for place, more in enumerate((flops, moved, 1)):
            cost[place] += more


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes that are read or written; an expanded tensor has those of its storage."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _rule_of(func: OpOverload) -> _BookingRule:
    returns = func._schema.returns
    name = func._schema.name.removeprefix("aten::")
    aliases = [r.alias_info for r in returns]
    is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
    formula = flop_registry.get(_SAME_FLOPS.get(name, func._overloadpacket)) or _GROUPED.get(name)
    names = [argument.name for argument in func._schema.arguments]
    is_attention = formula is not None and "attention" in name
    return _BookingRule(
        name=name,
        is_free=is_view or name in _FREE or not returns,
        allocates=any(a is None for a in aliases),
        kind="memory" if formula is None else "attention" if is_attention else "matmul",
        flops=formula,
        causal_at=names.index("is_causal") if is_attention and "is_causal" in names else None,
    )


def _flops_of(
    rule: _BookingRule, args: Sequence[object], kwargs: Mapping[str, object], out: object
) -> int:
    """Return the FLOPs of an operation; see Note [Costs]."""
    if rule.flops and rule.name.startswith("_scaled_dot_product"):  # for torch 2.11
        args = _by_query_heads(args, 1 if "backward" in rule.name else 0)
    flops = rule.flops(*args, **kwargs, out_val=out) if rule.flops else 0
    if rule.causal_at is not None:
        flops //= 2 if [*args[rule.causal_at :], kwargs.get("is_causal", False)][0] else 1
    if rule.name.endswith("attention_backward") or "attention_for_cpu_backward" in rule.name:
        flops = flops * 4 // 5
    return flops


def _by_query_heads(args: Sequence[object], query_at: int) -> Sequence[object]:
    """Repeat heads that queries share: torch 2.11 counts no products of shared keys and values."""
    query, key, value = (t for t in args[query_at : query_at + 3] if isinstance(t, Tensor))
    if key.shape[1] == query.shape[1]:
        return args
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    return [*args[: query_at + 1], key, value, *args[query_at + 3 :]]


def _grouped_mm(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Run a grouped product: its fake kernel takes bfloat16 alone, the real ones other dtypes."""
    left, right, *rest = args
    assert isinstance(left, Tensor) and isinstance(right, Tensor)
    out: Tensor = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *rest, **kwargs)
    return out.to(left.dtype)


def _grouped_flops(left: Tensor, right: Tensor, *rest: object, **kwargs: object) -> int:
    """Count a product of which rows, columns or the summed dimension are cut into groups."""
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]


_GROUPED: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_flops,
    "transformers::grouped_mm_fallback": _grouped_flops,
    "transformers::grouped_mm_fallback_backward": lambda *args, **kwargs: 2 * _grouped_flops(*args),
}
