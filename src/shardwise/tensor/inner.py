"""Tensor subclasses that define their own gather, as the plain tensors inside them.

Note [What is stored of a tensor subclass]
Float8 and quantized weights have a class with `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
Such a tensor holds plain tensors, which an optimizer updates: those that `__tensor_flatten__`
names, or else its attributes. Each is cut by rows as the tensor is, so that any number of ranks can
read a checkpoint of any other number. A single plain tensor of the same shape is stored under the
tensor's name; otherwise the attribute follows the name. A plain tensor without one row per row of
the tensor has no defined cut and is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.torch_collectives import waited_for
from shardwise.errors import ConfigError
from shardwise.layout.segments import build_layout
from shardwise.tensor.cut import Cut, make_cut


@dataclass(frozen=True, eq=False)
class Inner:
    """One plain tensor of a parameter: ``suffix`` of its name, this rank's part, and its cut."""

    suffix: str
    local: torch.Tensor
    cut: Cut


def holds_codes(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements are codes, which no cast or encoding may change.

    Quantized weights may have a float dtype: those of bitsandbytes, which have a
    ``quant_state``, in any (``quant_storage=``); float8 and float4 weights have a scale elsewhere.
    """
    is_small = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return is_small or getattr(tensor, "quant_state", None) is not None


def has_own_gather(local: torch.Tensor) -> bool:
    """Tell whether the tensor's class defines its gather, in both methods."""
    has = [hasattr(local, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
    if has[0] != has[1]:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions: {local}"
        )
    return has[0]


def refuse_opaque(local: torch.Tensor, name: str) -> None:
    """Refuse a parameter that wraps other tensors and does not define its gather.

    Also refuse the weight of bitsandbytes' ``Linear8bitLt``: its codes and scales are attributes,
    which the full parameter would not have.

    **Raises** ConfigError with the parameter's name and class.
    """
    if any(kind.__name__ == "Int8Params" for kind in type(local).__mro__):
        raise ConfigError(
            f"parameter '{name}' is an Int8Params, the weight of bitsandbytes' Linear8bitLt "
            "(LLM.int8): its codes and scales are attributes of the parameter, which cannot be cut "
            "and gathered. Use 4-bit layers (Linear4bit; in transformers "
            "BitsAndBytesConfig(load_in_4bit=True)), or leave the layer unquantized"
        )
    if hasattr(local, "__tensor_flatten__") and not has_own_gather(local):
        raise ConfigError(
            f"parameter '{name}' is a {type(local).__name__}, a class that wraps other tensors and "
            "does not define fsdp_pre_all_gather and fsdp_post_all_gather, so it cannot be cut and "
            "gathered. Shard the model before it is quantized, or use weights whose parameters are "
            "plain tensors (bitsandbytes' 4-bit linear layers)"
        )


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two plain tensors have the same bits, those of NaN included."""
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def plain_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors inside a tensor by suffix; "" if there is one, of the same shape.

    See Note [What is stored of a tensor subclass].
    """
    if not has_own_gather(tensor):
        return {"": tensor}
    parts = dict(_walk(tensor.detach()))
    if len(parts) == 1:
        (only,) = parts.values()
        return {"": only} if only.shape == tensor.shape else parts
    return parts


def _walk(tensor: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    tensor = waited_for(tensor)  # DTensor gathers asynchronously
    if type(tensor) is torch.Tensor:
        yield path, tensor
        return
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names = flatten()[0]
    else:
        names = [name for name, value in vars(tensor).items() if isinstance(value, torch.Tensor)]
    if not names:  # a class that adds only methods
        yield path, tensor.as_subclass(torch.Tensor)
    for name in names:
        yield from _walk(getattr(tensor, name), f"{path}.{name}")


def chunk_of(values: torch.Tensor, num_ranks: int, rank: int, dim: int = 0) -> torch.Tensor:
    """Return a copy of a rank's chunk, cut as by ``torch.chunk``.

    The memory of a tensor subclass is padded to the largest rank's, as its gather may need that.
    """
    size = values.shape[dim]
    rows = -(-size // num_ranks)
    chunks = values.chunk(num_ranks, dim)  # a class may support only this way of slicing
    chunk = chunks[rank] if rank < len(chunks) and size else values.narrow(dim, size, 0)
    length = chunk.shape[dim]
    if type(values) is torch.Tensor:
        return chunk.clone()  # a DTensor made of a view can be neither pickled nor copied
    padded = list(values.shape)
    padded[dim] = rows
    made = values.new_zeros(padded)
    if length:
        made.narrow(dim, 0, length).copy_(chunk)
    return made.narrow(dim, 0, length)


def cut_by_rows(shape: tuple[int, ...], cut: Cut) -> Cut:
    """Describe a tensor that is cut by rows over the ranks of another tensor's cut."""
    if cut.layout is None:
        return make_cut(shape, None, 0, cut.comm)
    return make_cut(shape, build_layout("rows", [shape], cut.layout.num_ranks), 0, cut.comm)


def inner_of(local: torch.Tensor, cut: Cut, name: str) -> list[Inner]:
    """Return a sharded tensor itself, or the plain tensors inside it.

    **Raises** ConfigError with the name of a plain tensor that cannot be cut by rows with it.
    """
    if not has_own_gather(local):
        return [Inner("", local, cut)]
    inner = []
    for suffix, part in plain_parts(local).items():
        if not part.dim() or part.shape[0] != local.shape[0]:
            raise ConfigError(
                f"parameter '{name}' is a {type(local).__name__}, whose '{suffix[1:]}' has shape "
                f"{tuple(part.shape)}: not a row for each of the parameter's, so its cut "
                "is unknown; use torch.distributed.checkpoint for such a model"
            )
        inner.append(Inner(suffix, part, cut_by_rows((cut.shape[0], *part.shape[1:]), cut)))
    return inner


@torch.no_grad()
def gather_whole(local: torch.Tensor, cut: Cut, name: str = "(tensor)") -> torch.Tensor:
    """Return the whole tensor, of the class of this rank's part.

    **Cost** one all-gather for each plain tensor inside it.
    """
    if not has_own_gather(local):
        return cut.gather(local)
    full = local.new_zeros(cut.shape)
    for inner, target in zip(inner_of(local, cut, name), plain_parts(full).values(), strict=True):
        target.copy_(inner.cut.gather(inner.local))
    return full


def version_of(local: torch.Tensor) -> int:
    """Return a number that changes when the tensor, or one inside it, is modified."""
    return local._version + sum(part._version for _, part in _walk(local))
