"""Verdicts in words: compare what the reader's code gave with what was asked for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise_labs.counting import Traffic


class WrongAnswer(Exception):
    """What the reader's code gave cannot be compared; the text says why."""


def times(count: float) -> str:
    """Return a factor, as '2.000 x'."""
    return f"{count:.3f} x"


def kind_of(value: object) -> str:
    """Return a value's kind in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None: does it return?" if value is None else f"a {type(value).__name__}"


def tensor_of(what: str, value: object, shape: tuple[int, ...]) -> Tensor:
    """Return ``value`` if it is a tensor of this shape, else raise WrongAnswer."""
    if not isinstance(value, Tensor):
        raise WrongAnswer(f"{what} is {kind_of(value)}; a tensor of shape {shape} is expected")
    if tuple(value.shape) != shape:
        rows = (
            f"{value.shape[0]} elements, {shape[0]} expected"
            if value.dim() == 1 == len(shape)
            else ""
        )
        said = rows or f"shape {tuple(value.shape)}, {shape} expected"
        raise WrongAnswer(f"{what} has {said}")
    return value.detach()


def number_of(what: str, value: object) -> float:
    """Return ``value`` if it is a number, else raise WrongAnswer."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongAnswer(f"{what} is {kind_of(value)}; a number is expected")
    return value


def difference(
    what: str,
    got: Tensor,
    want: Tensor,
    known: Mapping[str, Tensor] | None = None,
    within: float = 0.0,
) -> str | None:
    """Return in words how ``got`` differs from ``want``; None if it does not.

    ``known`` are typical wrong values with their explanations. Equality is of bits, unless
    ``within`` gives a relative tolerance.
    """
    if torch.equal(got, want) or (within and torch.allclose(got, want, rtol=within, atol=within)):
        return None
    if not got.isfinite().all():
        return f"{what} has values that are not finite"
    for words, wrong in (known or {}).items():
        if wrong.shape == got.shape and torch.allclose(got, wrong, rtol=1e-5, atol=1e-8):
            return f"{what} {words}"
    if not got.any():
        return f"{what} is all zeros"
    where = want.abs() > want.abs().max() / 100
    ratio = got[where] / want[where]
    if (ratio - ratio[0]).abs().max() < 1e-4 * ratio[0].abs() and abs(float(ratio[0]) - 1) > 1e-3:
        return f"{what} is exactly {times(float(ratio[0]))} what was asked for"
    wrong = (got != want).flatten()
    first = int(wrong.nonzero()[0])
    count = int(wrong.sum())
    pair = f"{float(got.flatten()[first]):.6g}, {float(want.flatten()[first]):.6g} expected"
    close = torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    rounding = " (it is close: the same sum in another order?)" if close else ""
    return (
        f"{what} differs in {count} of {got.numel()} elements, first at {first}: {pair}{rounding}"
    )


def count_difference(
    what: str, got: float, want: float, known: Mapping[str, float] | None = None, slack: float = 0.0
) -> str | None:
    """Return in words how a number of bytes differs from the expected; None if it does not."""
    if abs(got - want) <= slack * want:
        return None
    for words, wrong in (known or {}).items():
        if abs(got - wrong) <= max(slack, 1e-3) * wrong:
            return f"{got:,.0f} {what}, {want:,.0f} expected: {words}"
    return f"{got:,.0f} {what}, {want:,.0f} expected ({times(got / want) if want else 'none'})"


def sent_difference(traffic: Traffic, needed: int, would_do: str) -> str | None:
    """Return in words how the bytes sent differ from those needed; None if they do not."""
    sent = traffic.sent
    if sent == needed:
        return None
    if not traffic.calls:
        return f"no collective was called; a {would_do} is needed"
    names = ", ".join(dict.fromkeys(call.name.replace("_", "-") for call in traffic.calls))
    line = f" (line {traffic.calls[0].line})" if traffic.calls[0].line else ""
    if sent < needed:
        return f"{sent:,} bytes sent, {needed:,} are needed: {names}{line}"
    return f"{sent:,} bytes sent, {needed:,} are needed: {names}{line} where {would_do} would do"
