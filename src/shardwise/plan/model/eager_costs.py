"""What a decoder costs in eager PyTorch: its kernels, counted as a trace counts them.

Note [A line of the table]
A line is what one pass of a layer moves per token and element of a width, summed over its kernels:
``copies`` go from the computing dtype to float32 or back, and are none where both are one dtype;
``float32`` and ``compute`` are elements read or written in these dtypes. ``kernels`` are without
the copies. ``only`` names what must hold for the shape. ``test_one_model.py`` holds the sums
against traces of presets, in seconds and in bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardwise.plan.model.execution import Execution
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import DTYPE_BYTES

Width = Literal["dim", "q", "kv", "ffn", "vocab"]
_Counts = tuple[int, float, float, int]  # of a line: copies, float32, compute and kernels


@dataclass(frozen=True)
class _Line:
    """One line of a table; see the Note."""

    width: Width
    copies: int
    float32: float
    compute: float
    kernels: int
    only: str = ""


_RMS, _RMS_BACKWARD = (2, 7, 0, 6), (2, 23, 0, 15)  # squares, mean, root, scales; all of its parts
_LAYER, _LAYER_BACKWARD = (0, 0, 2, 1), (0, 0, 3, 1)
_TURN, _TURN_BACKWARD = (2, 9, 0, 7), (2, 10, 0, 8)  # rotary positions, of halves
# The same as transformers has them: norms scale, and positions turn, in the computing dtype.
_CAST, _CAST_BACKWARD = (2, 5, 2, 6), (2, 17, 6, 14)
_HALVES, _HALVES_BACKWARD = (0, 0, 10, 5), (0, 0, 16, 8)


def _norms(rms: _Counts, cast: _Counts, layer: _Counts) -> tuple[_Line, ...]:
    """Return the lines of one norm of the stream, whichever it is."""
    kinds = {"rms": rms, "rms_cast": cast, "layer": layer}
    return tuple(_Line("dim", *counts, only) for only, counts in kinds.items())


def _of_heads(rms: _Counts, cast: _Counts, turn: _Counts, halves: _Counts) -> tuple[_Line, ...]:
    """Return the lines of queries and keys: their norms, if they have any, and positions."""
    kinds = {"qk_norm": rms, "qk_norm_cast": cast, "rotary": turn, "rotary_halves": halves}
    widths: tuple[Width, ...] = ("q", "kv")
    return tuple(_Line(width, *counts, only) for only, counts in kinds.items() for width in widths)


_FORWARD = (
    *2 * _norms(_RMS, _CAST, _LAYER),
    *_of_heads(_RMS, _CAST, _TURN, _HALVES),
    _Line("q", 0, 0, 2, 1, "rotary"),  # heads side by side
    _Line("q", 0, 0, 0, 2, "cast"),  # tables of positions, which each unit is given in its dtype
    _Line("dim", 0, 0, 6, 2),  # both updates are added
    _Line("ffn", 0, 0, 5, 2, "gated"),
    _Line("ffn", 0, 0, 2, 1, "plain"),
)
_BACKWARD = (
    *2 * _norms(_RMS_BACKWARD, _CAST_BACKWARD, _LAYER_BACKWARD),
    *_of_heads(_RMS_BACKWARD, _CAST_BACKWARD, _TURN_BACKWARD, _HALVES_BACKWARD),
    _Line("q", 0, 0, 2, 1, "rotary"),
    _Line("kv", 0, 0, 2, 1, "rotary"),
    _Line("dim", 0, 0, 12, 4),  # gradients of what several read are summed
    _Line("dim", 0, 0, 3, 1, "gated"),
    _Line("ffn", 0, 0, 9, 3, "gated"),
    _Line("ffn", 0, 0, 3, 1, "plain"),
    _Line("q", 0, 0, 1, 1, "qkv_bias"),
    _Line("kv", 0, 0, 2, 2, "qkv_bias"),
    _Line("dim", 0, 0, 2, 2, "bias"),
    _Line("ffn", 0, 0, 1, 1, "bias"),
)
_END = _norms(_RMS, _CAST, _LAYER)
_END_BACKWARD = _norms(_RMS_BACKWARD, _CAST_BACKWARD, _LAYER_BACKWARD)
_LOSS = (_Line("vocab", 1, 3, 0, 2),)  # log-softmax, and what it says of the targets
_LOSS_BACKWARD = (_Line("vocab", 1, 5, 0, 2),)


def eager_layer(shape: DecoderShape, run: Execution, *, backward: bool = False) -> Cost:
    """Return what one layer's kernels between its products move, forward or backward."""
    return _moved(_BACKWARD if backward else _FORWARD, shape, run)


def eager_end(shape: DecoderShape, run: Execution, *, backward: bool = False) -> Cost:
    """Return what the last norm moves."""
    return _moved(_END_BACKWARD if backward else _END, shape, run)


def eager_loss(shape: DecoderShape, run: Execution, *, backward: bool = False) -> Cost:
    """Return what the cross-entropy of whole logits moves."""
    return _moved(_LOSS_BACKWARD if backward else _LOSS, shape, run)


def _moved(lines: Iterable[_Line], shape: DecoderShape, run: Execution) -> Cost:
    size = DTYPE_BYTES[run.dtype]
    facts = _facts(shape, run, size)
    widths = _widths(shape, run)
    moved, kernels = 0.0, 0
    for line in lines:
        if line.only and line.only not in facts:
            continue
        copies = 0 if size == 4 else line.copies
        each = copies * (4 + size) + 4 * line.float32 + size * line.compute
        moved += each * widths[line.width]
        kernels += line.kernels + copies
    return Cost("memory", run.dtype, 0, round(moved), kernels)


def _widths(shape: DecoderShape, run: Execution) -> dict[Width, float]:
    """Return the elements of each width that a rank has; logits are whole on all of them."""
    stream = run.tp if run.sequence_parallel else 1
    return {
        "dim": shape.dim * run.tokens / stream,
        "q": shape.q_dim * run.tokens / run.tp,
        "kv": shape.kv_dim * run.tokens / run.tp,
        "ffn": shape.ffn * run.tokens / run.tp,
        "vocab": shape.vocab * run.tokens,
    }


def _facts(shape: DecoderShape, run: Execution, size: int) -> set[str]:
    own = run.implementation != "transformers"
    rotary = shape.norm == "rms" and not shape.positions
    norm = "rms_cast" if shape.norm == "rms" and not own else shape.norm
    facts = {norm, "gated" if shape.gated else "plain"}
    facts.update(
        name
        for name, holds in (
            ("rotary", rotary and own),
            ("rotary_halves", rotary and not own),
            ("cast", rotary and own and size < 4),
            ("qk_norm", shape.qk_norm and own),
            ("qk_norm_cast", shape.qk_norm and not own),
            ("qkv_bias", shape.qkv_bias),
            ("bias", shape.bias),
        )
        if holds
    )
    return facts


def eager_products(shape: DecoderShape, run: Execution) -> int:
    """Return the bytes that the matrix products of a dense layer read and write, forward."""
    size, up = DTYPE_BYTES[run.dtype], 2 if shape.gated else 1
    pairs = [(shape.dim, shape.q_dim), (shape.q_dim, shape.dim), (shape.ffn, shape.dim)]
    pairs += 2 * [(shape.dim, shape.kv_dim)] + up * [(shape.dim, shape.ffn)]
    total = 0
    for rows, columns in pairs:
        total += (rows + columns) * run.tokens + rows * columns // run.tp
    return total * size
