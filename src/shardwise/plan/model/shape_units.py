"""The units of one rank of a decoder by its shape: the parameters that each has there.

They are those of the built-in decoder. Tensor parallelism cuts rows of what comes first in
attention and feed-forward, and columns of what comes last (`train.degrees`); norms, routers and
routed experts are whole.
"""

from fractions import Fraction

from shardwise.plan.model.execution import Execution
from shardwise.plan.model.shapes import DecoderShape
from shardwise.plan.model.tape import ParamFacts, UnitFacts


def root_unit(shape: DecoderShape, run: Execution) -> UnitFacts:
    """Return what belongs to no layer: embedding, last norm and head, where they are."""
    params: list[ParamFacts] = []
    if run.first or (run.last and shape.tied):
        params.append(_param("embedding", shape.vocab // run.tp, shape.dim))
    if run.first and shape.positions:
        params.append(_param("positions", shape.positions, shape.dim))
    if run.last:
        params += _norm(shape, "norm")
        if not shape.tied:
            params.append(_param("head", shape.vocab // run.tp, shape.dim))
    return UnitFacts("", "Decoder", tuple(params))


def layer_units(shape: DecoderShape, run: Execution) -> tuple[UnitFacts, ...]:
    """Return the unit of a layer, without its name; spread experts are one of their own."""
    experts, tp = shape.experts, run.tp
    params = [*_norm(shape, "attention_norm"), *_attention(shape, tp)]
    params += _norm(shape, "feed_forward_norm")
    if experts is None:
        params += _feed_forward(shape, "feed_forward", shape.ffn, tp)
        return (UnitFacts("", "Layer", tuple(params)),)
    params.append(_param("router", experts.num, shape.dim))
    routed = _routed(shape, run)
    if run.ep == 1:
        params += routed
    if experts.shared:
        params += _feed_forward(shape, "shared", experts.shared * experts.ffn, tp)
    layer = UnitFacts("", "Layer", tuple(params))
    if run.ep == 1:
        return (layer,)
    over = Fraction(tp, run.ep)
    return layer, UnitFacts(".experts", "Experts", tuple(routed), experts_over=over)


def _param(name: str, *shape: int) -> ParamFacts:
    return ParamFacts(name, shape, "float32")


def _norm(shape: DecoderShape, name: str) -> list[ParamFacts]:
    biases = [_param(f"{name}.bias", shape.dim)] if shape.norm_bias else []
    return [_param(name, shape.dim), *biases]


def _attention(shape: DecoderShape, tp: int) -> list[ParamFacts]:
    found = []
    widths = {"query": shape.q_dim, "key": shape.kv_dim, "value": shape.kv_dim}
    for name, width in widths.items():
        found.append(_param(name, width // tp, shape.dim))
        if shape.qkv_bias:
            found.append(_param(f"{name}.bias", width // tp))
    found.append(_param("out", shape.dim, shape.q_dim // tp))
    if shape.bias:
        found.append(_param("out.bias", shape.dim))
    if shape.qk_norm:
        found += [_param(f"{name}_norm", shape.head_dim) for name in ("query", "key")]
    return found


def _feed_forward(shape: DecoderShape, name: str, width: int, tp: int) -> list[ParamFacts]:
    found = []
    for part in ("gate", "up") if shape.gated else ("up",):
        found.append(_param(f"{name}.{part}", width // tp, shape.dim))
        if shape.bias:
            found.append(_param(f"{name}.{part}.bias", width // tp))
    found.append(_param(f"{name}.down", shape.dim, width // tp))
    if shape.bias:
        found.append(_param(f"{name}.down.bias", shape.dim))
    return found


def _routed(shape: DecoderShape, run: Execution) -> list[ParamFacts]:
    """Return the routed experts that a rank has, stacked."""
    assert shape.experts is not None
    here, width = shape.experts.num // run.ep, shape.experts.ffn
    return [
        _param(param.name, here, *param.shape)
        for param in _feed_forward(shape, "experts", width, 1)
    ]
