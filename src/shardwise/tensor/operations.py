"""Tables of the operations that may run on slices, by name; all others need the whole tensor.

An elementwise operation maps element i of its inputs to element i of its output, so it may run on
this rank's elements alone. Python functions and ATen packets have the same names; a trailing
underscore is the in-place form.
"""

from collections.abc import Sequence
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNARY = """
abs absolute neg negative sign sgn sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p sin cos
tan tanh sinh cosh asin acos atan erf erfc erfinv sigmoid logit relu reciprocal floor ceil round
trunc frac isnan isinf isfinite isposinf isneginf nan_to_num positive logical_not bitwise_not
signbit lgamma
"""
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
maximum minimum fmax fmin eq ne lt le gt ge not_equal less less_equal greater greater_equal
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2 copysign hypot xlogy
rsub lerp addcmul addcdiv clamp clip clamp_min clamp_max where masked_fill copy nextafter ldexp
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __idiv__ __div__ __rdiv__ __pow__ __rpow__ __ipow__ __neg__ __abs__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __mod__
__floordiv__
"""
_FILL = "zero fill"
_COPIES = """
clone contiguous _to_copy float double half bfloat16 long int short char byte bool type type_as
cpu cuda
zeros_like ones_like empty_like full_like lift_fresh
"""

# Element i of the inputs to element i of an output of the same shape.
ELEMENTWISE = frozenset(
    name
    for word in (_UNARY + _BINARY + _FILL).split()
    for name in (word, word if word.startswith("__") else word + "_")
) | _names(_COPIES)

# The forms for lists of tensors. torch has a foreach form for some of the names only.
ELEMENTWISE_LISTS = frozenset(f"_foreach_{name}" for name in ELEMENTWISE) | _names(
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
)

# In-place draws. Every rank draws the whole tensor and keeps its slice, so the values do not
# depend on the number of ranks (given the same seed on all of them).
RANDOM = _names("normal_ uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_")

# Functions that draw from a generator. Outside a forward or backward pass all ranks draw equal
# values, see `draws`. Those of LIKE make a tensor of their argument's shape.
LIKE = _names("rand_like randn_like randint_like")
DRAWS = (
    RANDOM
    | LIKE
    | _names(
        """
        bernoulli normal poisson binomial multinomial dropout dropout_ dropout1d dropout2d dropout3d
        native_dropout feature_dropout feature_dropout_ alpha_dropout alpha_dropout_
        feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ gumbel_softmax kaiming_uniform_
        """
    )
)

# Answered from the global description alone.
METADATA = _names(
    """
    size dim ndimension numel nelement stride element_size is_floating_point is_complex is_signed
    is_contiguous storage_offset get_device is_inference is_shared untyped_storage
    is_same_size has_names __len__ __hash__ __repr__ __str__ dim_order _is_view retain_grad
    _typed_storage type is_pinned is_conj is_neg result_type can_cast is_storage
    """
)

# Equal for the local tensor, which answers faster: optimizers ask every parameter in every step.
LOCAL_FACTS = _names(
    """
    is_floating_point is_complex is_signed element_size get_device dtype device layout is_cuda
    is_cpu is_sparse is_sparse_csr is_meta is_quantized is_mkldnn is_mps
    """
)

# Answered of a tensor whose values are not complete yet: a norm or gradient of this rank alone.
FACTS = LOCAL_FACTS | _names(
    """
    size dim ndimension numel nelement stride is_contiguous is_same_size shape ndim requires_grad
    is_leaf grad_fn itemsize nbytes names is_nested __len__ __hash__
    """
)

# Properties that are operations on the elements.
FULL_PROPERTIES = _names("T mT H mH real imag")

# Methods that make a new tensor of any shape.
FACTORIES = _names("new new_zeros new_ones new_empty new_full new_tensor")

# Not recorded by autograd, so a parameter's shard may answer in grad mode.
GRAD_FREE = _names("detach requires_grad_ zeros_like ones_like empty_like full_like")

# Reductions of a whole tensor to one number, with the reduction over ranks that completes each.
REDUCTIONS = {
    "sum": "sum",
    "mean": "sum",
    "max": "max",
    "amax": "max",
    "min": "min",
    "amin": "min",
    "all": "min",
    "any": "max",
    "count_nonzero": "sum",
    "prod": "prod",
}

NORMS = _names("norm vector_norm linalg_vector_norm")

# Matrix products; elementwise if the summed dim has one element.
PRODUCTS = _names("matmul mm __matmul__")

# Kernels of other libraries that update the elements in place, one by one or in blocks.
KERNELS = _names("optimizer_update_32bit optimizer_update_8bit_blockwise")

# In-place forms that change a tensor's shape or memory, which a sharded model keeps.
RESHAPES = _names(
    """
    t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ as_strided_ set_
    """
)


def swaps_dim_with_itself(name: str, args: Sequence[Any]) -> bool:
    """Tell whether a call is of `RESHAPES` and changes nothing: ``tensor.transpose_(0, 0)``."""
    tensor, *dims = args
    if name not in ("transpose_", "swapaxes_", "swapdims_") or len(dims) != 2:
        return False
    num_dims = tensor.dim()
    in_range = all(-num_dims <= dim < num_dims for dim in dims)
    return in_range and (dims[0] - dims[1]) % num_dims == 0
