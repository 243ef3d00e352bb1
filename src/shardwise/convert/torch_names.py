"""What torch's pickles name, as data: dtypes, storages, and tensors that are not loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwise.checkpoint.container import element_bytes, is_dtype, torch_dtype
from shardwise.convert.plain_names import PLAIN
from shardwise.convert.unpickle import Builder, Name

_MAX_DIMS = 64
_MAX_INDEX = 1 << 50

STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        "Double": "F64",
        "Float": "F32",
        "Half": "F16",
        "BFloat16": "BF16",
        "Long": "I64",
        "Int": "I32",
        "Short": "I16",
        "Char": "I8",
        "Byte": "U8",
        "Bool": "BOOL",
        "ComplexFloat": "C64",
    }.items()
}
UNTYPED = "torch.storage.UntypedStorage"
_SPELLINGS = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "BOOL"),
    *("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"),
)
DTYPES = {str(torch_dtype(spelling)): spelling for spelling in _SPELLINGS}


@dataclass(frozen=True, slots=True)
class Storage:
    """One record of bytes; ``dtype`` is "" where each tensor on it says its own."""

    record: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor that is not loaded: which elements of which record it has."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


def index_of(value: Any) -> int:
    """Return a size or place. **Raises** ValueError if it is none."""
    if type(value) is not int or not 0 <= value < _MAX_INDEX:
        raise ValueError("a size or place that is none")
    return value


def extent(tensor: StoredTensor) -> int:
    """Return how many elements lie between its first and its last one, both counted."""
    sizes = zip(tensor.shape, tensor.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any, dtype: str = ""
) -> StoredTensor:
    if not isinstance(storage, Storage) or len(shape) > _MAX_DIMS:
        raise ValueError("a tensor without its bytes")
    sizes, steps = tuple(map(index_of, shape)), tuple(map(index_of, strides))
    dtype = dtype or storage.dtype
    if len(sizes) != len(steps) or not is_dtype(dtype):
        raise ValueError(f"a tensor of {dtype!r} with shape {sizes} and strides {steps}")
    tensor = StoredTensor(dtype, sizes, steps, index_of(offset), storage)
    has = storage.numel // (1 if storage.dtype else element_bytes(dtype))
    if tensor.numel > has or (tensor.numel and tensor.offset + extent(tensor) > has):
        raise ValueError(f"a tensor of {tensor.offset} + {extent(tensor)} elements of {has}")
    return tensor


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> StoredTensor:
    return _tensor(storage, offset, shape, strides, dtype=DTYPES[dtype.text])


def _tensor_of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, Name) or function.text not in _TENSORS:
        raise ValueError("a tensor that is not rebuilt as torch does")
    return _TENSORS[function.text](*args)


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str):
        raise ValueError("a device that is no text")
    return kind if index is None else f"{kind}:{index_of(index)}"


_TENSORS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}
NAMES: Mapping[str, Builder | None] = {
    **PLAIN,
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "argparse.Namespace": None,
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch.Size": lambda sizes=(): tuple(map(index_of, sizes)),
    "torch.device": _device,
    UNTYPED: None,
    **dict.fromkeys(STORAGES),
    **dict.fromkeys(DTYPES),
}
