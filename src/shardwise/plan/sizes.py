"""Tables of dtypes, precisions and optimizers: the bytes of each kind of tensor.

Note [Precisions]
The engine runs ``fp32``, ``bf16`` and ``fp16``, its own table (`precisions`) for a float32 model,
and ``pure_bf16``, which is ``Precision`` with bfloat16 three times. The others describe the state
of other systems. They have two things that the engine does not do: a shard of the parameters in the
compute dtype beside the master weights, and a second copy of the gradients in the optimizer's
dtype.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, Literal, TypeVar

from shardwise.errors import ConfigError
from shardwise.optim.kinds import BLOCK
from shardwise.precisions import PRECISION_DTYPES
from shardwise.spelling import did_you_mean

DtypeName = Literal["float32", "bfloat16", "float16", "float8", "float64", "int8", "int64"]

DTYPE_BYTES: dict[DtypeName, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
    "int64": 8,
}
_SCALE_BYTES = 4  # of a quantized block, float32
_SCALAR_BYTES = 4  # of a step counter, float32

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Dtypes:
    """One row of the table of precisions; see Note [Precisions].

    ``compute`` is the dtype of full parameters, ``master`` that of the elements which the optimizer
    updates, ``reduce`` that of reduced gradients and of sums over micro-batches.
    ``keeps_compute_shard``: sharded parameters have a persistent shard in the dtype ``compute``
    beside the master's. ``optimizer_grad``: gradients are copied into this dtype for the optimizer,
    sharded as its state is.
    """

    compute: DtypeName
    master: DtypeName
    reduce: DtypeName
    source: str
    keeps_compute_shard: bool = False
    optimizer_grad: DtypeName | None = None

    @property
    def has_master(self) -> bool:
        """True if master weights are copies separate from the parameters that the layers read."""
        return self.master != self.compute

    @property
    def engine_runs_it(self) -> bool:
        """True if the engine can train in this precision."""
        return not self.keeps_compute_shard and self.optimizer_grad is None


_ENGINE = "shardwise.precisions.PRECISION_DTYPES"
_MEGATRON = "Megatron Core user guide, distributed optimizer, bytes per parameter"

PRECISIONS: dict[str, Dtypes] = {
    **{
        name: Dtypes(compute or "float32", master or "float32", reduce or "float32", _ENGINE)
        for name, (compute, master, reduce) in PRECISION_DTYPES.items()
    },
    "pure_bf16": Dtypes("bfloat16", "bfloat16", "bfloat16", "shardwise.Precision, bfloat16 thrice"),
    "zero_paper": Dtypes("float16", "float32", "float16",
        "ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + K bytes, K = 12 for Adam",
        keeps_compute_shard=True),
    "megatron_bf16": Dtypes("bfloat16", "float32", "float32", f"{_MEGATRON}: 18, or 6 + 12/d",
        keeps_compute_shard=True),
    "megatron_fp16": Dtypes("float16", "float32", "float16", f"{_MEGATRON}: 20, or 4 + 16/d",
        keeps_compute_shard=True, optimizer_grad="float32"),
}  # fmt: skip


@dataclass(frozen=True)
class Optimizer:
    """One row of the table of optimizers: the parts of its state.

    ``num_like`` state tensors have the parameter's shape, in ``bits`` per element or (``None``) in
    the master dtype, with one float32 scale per ``block`` elements (0: none). ``factored``: of
    matrices there are the means of rows and columns instead, of all else one tensor of its shape.
    ``has_step``: one float32 counter per tensor. ``note`` names the parts that the row leaves out.
    ``by``: the library whose class steps an offloaded unit by itself, torch or the engine ("own");
    if "", all units step at once, in host memory.
    """

    num_like: int
    source: str
    bits: int | None = None
    block: int = 0
    factored: bool = False
    has_step: bool = False
    note: str = ""
    by: Literal["", "torch", "own"] = ""

    @property
    def counter_bytes(self) -> int:
        """Bytes of the counter of one tensor."""
        return _SCALAR_BYTES * self.has_step

    def parts(self, numel: int, master: DtypeName) -> tuple[int, ...]:
        """Return the bytes of each part of the state of so many parameters: no counters."""
        bits = 8 * DTYPE_BYTES[master] if self.bits is None else self.bits
        scales = (-(-numel // self.block) * _SCALE_BYTES,) if self.block else ()
        return self.num_like * (-(-numel * bits // 8), *scales)

    def state_bytes(self, numel: int, master: DtypeName) -> int:
        """Return the bytes of state for so many parameters: no counters, all in matrices."""
        return sum(self.parts(numel, master))

    def tensor_bytes(self, shape: tuple[int, ...], master: DtypeName) -> int:
        """Return the bytes of state of one tensor of this shape, its counter included."""
        numel, total = prod(shape), self.counter_bytes
        if not self.factored:
            return total + self.state_bytes(numel, master)
        if len(shape) < 2 or not numel:
            return total + numel * DTYPE_BYTES[master]
        return total + (numel // shape[-1] + numel // shape[-2]) * DTYPE_BYTES[master]


_QUANTIZED = "tensors of fewer than 4,096 elements or no whole number of blocks stay as they are"
_TORCHAO = "torchao.optim: block_size {}, one float32 scale per block"

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(2, "torch.optim.AdamW: exp_avg, exp_avg_sq, step",
        has_step=True, by="torch"),
    "adam": Optimizer(2, "torch.optim.Adam: exp_avg, exp_avg_sq, step", has_step=True, by="torch"),
    "adamw_bf16_moments": Optimizer(2,
        f"shardwise.optim.AdamW(moments='bf16'); {_MEGATRON}: 6 + 8/d with bf16 moments",
        bits=16, has_step=True, by="own"),
    "adamw_8bit": Optimizer(2,
        f"shardwise.optim.AdamW(moments='8bit', block={BLOCK}): one float32 scale per block",
        bits=8, block=BLOCK, has_step=True, by="own",
        note=f"a slice that begins inside a block of {BLOCK} elements may have one scale more"),
    "adamw_4bit": Optimizer(2, _TORCHAO.format(128), bits=4, block=128, has_step=True,
        note=_QUANTIZED),
    "sgd": Optimizer(0, "torch.optim.SGD: no state", by="torch"),
    "sgd_momentum": Optimizer(1, "torch.optim.SGD with momentum: momentum_buffer", by="torch"),
    "lion": Optimizer(1, "Lion (arXiv 2302.06675), algorithm 2: one momentum"),
    "muon": Optimizer(1, "torch.optim.Muon: momentum_buffer",
        note="Muon updates matrices; embeddings, norms and biases need another optimizer's state"),
    "adafactor": Optimizer(0, "torch.optim.Adafactor: row_var and col_var, or variance; step",
        factored=True, has_step=True,
        note="Adafactor's means of rows and columns need shapes, and so are not in a count"),
}  # fmt: skip


def row_of(table: Mapping[str, _Row], name: str, field: str) -> _Row:
    """Return a table's row. **Raises** ConfigError that names the field and the nearest name."""
    if name in table:
        return table[name]
    meant = did_you_mean(str(name).lower(), table, cutoff=0.5)
    raise ConfigError(f"{field}={name!r}: expected one of {', '.join(table)}{meant}")


@cache
def read_table(name: str) -> Mapping[str, Any]:
    """Return the tables of ``data/<name>.toml``, in the file's order."""
    return tomllib.loads(
        files("shardwise.plan").joinpath("data", f"{name}.toml").read_text("utf-8")
    )
