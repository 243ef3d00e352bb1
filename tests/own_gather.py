"""Tensors of classes that define their own gather, as float8 and quantized weights do."""

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree


def wrapper_of(cls, like):
    """Return a tensor of a class, without memory, of the shape and dtype of another."""
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=like.device,
    )


class HalfSent(Tensor):
    """Values in fp32 that are gathered in bf16; it has no ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, values):
        return wrapper_of(cls, values)

    def __init__(self, values):
        self._values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        return f"HalfSent({self._values})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, out)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        padded[: self.shape[0]].copy_(self._values)
        return (padded,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is not None:
            with _unsafe_preserve_version_counter(out):
                out.copy_(gathered[: out.shape[0]])
            return None
        upcast = gathered.to(param_dtype)
        return upcast, (upcast,)


class Pair(TwoTensor):
    """Two tensors of the same values; its full form, and so its gradient, is a pair too."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (Pair(*outputs), outputs)


class OnlyChunked(HalfSent):
    """Values that can be cut by ``chunk``, and not by ``narrow``."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        is_slice = func is torch.ops.aten.slice.Tensor
        if is_slice and args[3] - args[2] < args[0].shape[args[1]]:
            raise NotImplementedError(f"{func} of {cls.__name__}")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Scaled(HalfSent):
    """Values beside a scale, which has no row for each of them."""

    def __tensor_flatten__(self):
        return ["_values", "scale"], None

    @property
    def scale(self):
        return self._values.new_ones(1)


class Unpadded(HalfSent):
    """Values that are sent twice, the second time without padding."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        sizes = outer_size, outer_stride
        padded, metadata = super().fsdp_pre_all_gather(mesh, *sizes, module, mp_policy)
        return (*padded, self._values), metadata


class Sum(Tensor):
    """The sum of two tensors of different widths: ``wide`` and, per row, ``shift``."""

    @staticmethod
    def __new__(cls, wide, shift):
        return wrapper_of(cls, wide)

    def __init__(self, wide, shift):
        self.wide, self.shift = wide, shift

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        return f"Sum({self.wide}, {self.shift})"

    def __tensor_flatten__(self):
        return ["wide", "shift"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Sum(inner["wide"], inner["shift"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        """Run on both: a plain gradient beside it has a column of sums for the shift."""
        kwargs = kwargs or {}

        def narrow(value):
            if isinstance(value, cls):
                return value.shift
            return value.sum(1, keepdim=True) if value.dim() == 2 else value

        aten = torch.ops.aten
        if func in (aten.new_zeros.default, aten.new_empty.default, aten.view.default):
            own, size, *others = args
            parts = [
                func(own.wide, size, *others, **kwargs),
                func(own.shift, [size[0], 1], *others, **kwargs),
            ]
            return cls(*parts)
        wides = pytree.tree_map_only(cls, lambda t: t.wide, (args, kwargs))
        shifts = pytree.tree_map_only(Tensor, narrow, (args, kwargs))
        out, other = func(*wides[0], **wides[1]), func(*shifts[0], **shifts[1])
        if func.overloadpacket.__name__.endswith("_"):
            return None if out is None else args[0]
        flat, spec = pytree.tree_flatten(out)
        pairs = zip(flat, pytree.tree_leaves(other), strict=True)
        return pytree.tree_unflatten(
            [cls(a, b) if isinstance(a, Tensor) else a for a, b in pairs], spec
        )

    def fsdp_pre_all_gather(self, mesh):
        return (self.wide, self.shift), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        wide, shift = outputs
        if out is not None:
            with _unsafe_preserve_version_counter(out):
                out.copy_(wide + shift)
            return None
        made = (wide + shift).to(param_dtype)
        return made, (made,)


REFUSED = {"scaled": Scaled, "unpadded": Unpadded}
KINDS = {
    "half": HalfSent,
    "sum": lambda values: Sum(values, values.new_full((values.shape[0], 1), 0.5)),
}


class OwnNet(nn.Module):
    """Linear maps whose weights define their own gather, beside plain biases and a plain head."""

    def __init__(self, kind, rows=6):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(rows, rows) for _ in range(2))
        self.head = nn.Linear(rows, 3)
        for block in self.blocks:
            block.weight = nn.Parameter((KINDS | REFUSED)[kind](block.weight.detach().clone()))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)
