"""The units of one rank of a decoder by its shape: the parameters that each has there.

They are those of the built-in decoder. Tensor parallelism cuts rows of what comes first in
attention and feed-forward, and columns of what comes last (`train.degrees`); norms, routers and
routed experts are whole.
"""

from collections.abc import Sequence
from fractions import Fraction

from shardwise.plan.model.execution import Execution
from shardwise.plan.model.shapes import DecoderShape, latent_products
from shardwise.plan.model.tape import ParamFacts, UnitFacts


def end_units(
    shape: DecoderShape, run: Execution, layers: Sequence[DecoderShape]
) -> tuple[UnitFacts | None, UnitFacts, UnitFacts | None]:
    """Return the units beside the layers: embedding, root and head; None for what the root has.

    With ``run.large_units`` a table that belongs to one end alone, and is as large as one of
    ``layers``, is a unit, as `layout.units` has it; and one layer alone is the root's, with all.
    """
    if alone := only_layer(run, layers):
        return None, UnitFacts("", "Decoder", _root_of(shape, run, alone)), None
    shares = shape.tied and run.first and run.last
    smallest = min((kind.layer_params() for kind in layers), default=0)
    is_large = run.large_units and not shares and shape.vocab * shape.dim >= smallest > 0
    table = (shape.vocab // run.tp, shape.dim)
    embedding = head = None
    root: list[ParamFacts] = []
    if run.first and is_large:
        params = (_param("embedding", *table),)
        embedding = UnitFacts("embedding", "TokenEmbedding", params, backward_reads_params=False)
    elif run.first:
        root.append(_param("embedding", *table))
    if run.first and shape.positions:
        root.append(_param("positions", shape.positions, shape.dim))
    if run.last:
        root += _norm(shape, "norm")
    if run.last and is_large:
        head = UnitFacts("head", "Projection", (_param("head", *table),))
    elif run.last and not shares:
        root.append(_param("head", *table))
    return embedding, UnitFacts("", "Decoder", tuple(root)), head


def only_layer(run: Execution, layers: Sequence[DecoderShape]) -> DecoderShape | None:
    """Return the layer that is the root's, as it has none like it beside it; None for others."""
    return layers[0] if run.large_units and len(layers) == 1 else None


def _root_of(shape: DecoderShape, run: Execution, layer: DecoderShape) -> tuple[ParamFacts, ...]:
    """Return what a root owns that has a layer, and the tables."""
    table = (shape.vocab // run.tp, shape.dim)
    found = [_param("embedding", *table)] if run.first else []
    if run.first and shape.positions:
        found.append(_param("positions", shape.positions, shape.dim))
    found += layer_units(layer, run)[0].params
    if run.last:
        found += _norm(shape, "norm")
        found += [] if shape.tied and run.first else [_param("head", *table)]
    return tuple(found)


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


def _latent_attention(shape: DecoderShape, tp: int) -> list[ParamFacts]:
    """Return the parameters of a latent attention; what makes a latent is whole on all ranks."""
    found = []
    for name, rows, columns in latent_products(shape):
        if name == "out":
            found.append(_param(name, rows, columns // tp))
        else:
            found.append(_param(name, rows if name.endswith("latent") else rows // tp, columns))
    return found


def _attention(shape: DecoderShape, tp: int) -> list[ParamFacts]:
    if shape.latent is not None:
        return _latent_attention(shape, tp)
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
