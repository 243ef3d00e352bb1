"""Names of precisions: ours, and those that torch has for the dtype to compute in."""

from shardwise.spelling import did_you_mean

_OURS = {
    "fp32": ("float32", "float"),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half"),
}
_NAMES = {name: ours for ours, others in _OURS.items() for name in (ours, *others)}


def plain_precision(value: object) -> object:
    """Return our name for a precision: "bf16" for `torch.bfloat16` or "bfloat16".

    What is none of them comes back as it is, for whoever checks it.
    """
    is_name = isinstance(value, str) or type(value).__name__ == "dtype"
    text = str(value).strip().lower().removeprefix("torch.")
    return _NAMES.get(text, value) if is_name else value


def nearest_precision(value: object) -> str:
    """Return "; did you mean 'bf16'?" for what is spelt like one of our names, else nothing."""
    return did_you_mean(value.lower(), _OURS, cutoff=0.8) if isinstance(value, str) else ""
