"""How far apart two results may lie that differ by their roundings alone, and checks that use it.

A rounding changes a number by a relative u at most, half an eps (fp32: 6e-8). After n of them in a
row a result is off by n u in the worst case, in whatever order a kernel sums (Higham, Accuracy and
Stability of Numerical Algorithms, 3.1). They go up as often as down, so that beyond a few their
square root counts: 4 sqrt(n) u holds but for one case in a thousand (Higham and Mary 2019, A New
Approach to Probabilistic Rounding Error Analysis, with lambda = 4). Two results are twice as far
apart. So a test says how many roundings stand behind each of its numbers, not how far off they are
on the machine that it was written on.

Where terms cancel, what is left is as wrong as the terms were. A tensor is therefore measured
against its largest element, not each element against itself.

A check has to be sharp, too: a gradient that is wrong by a relative 1e-4 must fail. A number of
roundings that would let half of it pass is refused; such a test needs a smaller model, or fp64.

Note [Losses after steps of Adam]
The first step of Adam moves a parameter by lr * g / (|g| + eps), which is lr * sign(g) unless
|g| is near eps. Where a gradient is near zero, rounding decides about its sign, and the parameter
goes 2 lr one way or the other: no number of roundings bounds that. And an Adam that is given 1.0001
times the gradient does the same as before. So what is compared after steps is made by SGD, whose
step is as far off as its gradient; or by Adam with ``SMOOTH_EPS``, large against the gradients,
which makes of its step a smooth function of them; and it is compared by gradients or moments, which
are wrong by as much as the gradient was. Losses are too flat for that.
"""

from math import sqrt

import torch
from torch import Tensor

SHARP = 1e-4  # a relative error that every check has to find
SMOOTH_EPS = 1e-2  # Note [Losses after steps of Adam]
_LAMBDA = 4


def unit(dtype=torch.float32):
    """Return the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def apart(roundings, dtype=torch.float32):
    """Return how far apart, relative to their scale, two results of so many roundings may lie.

    **Raises** ValueError if the check could not find an error of `SHARP`; for fp32 and fp64 only,
    since one rounding of bf16 is larger than that.
    """
    distance = 2 * unit(dtype) * min(roundings, _LAMBDA * sqrt(roundings))
    if distance > SHARP / 2 and dtype in (torch.float32, torch.float64):
        raise ValueError(f"{roundings} roundings of {dtype} hide an error of {SHARP}")
    return distance


def of_gradient(*sums, over):
    """Count the roundings of a gradient of layers that sum so many terms each, forward and back.

    ``over``: how many terms (rows of the batch, micro-batches, ranks) its own sum has. Beside its
    sum each layer rounds about four times: bias, activation, residual, scale.
    """
    return 2 * sum(terms + 4 for terms in sums) + over


def assert_rounded_alike(actual, expected, roundings, what="", scale=None):
    """Check that two results of so many roundings each differ by no more than these.

    ``scale``: what they are measured against, the largest element if None; numbers count as fp32.
    """
    ours, theirs = torch.as_tensor(actual), torch.as_tensor(expected)
    assert ours.shape == theirs.shape, f"{what}: shapes {ours.shape} and {theirs.shape}"
    dtype = theirs.dtype if isinstance(expected, Tensor) else torch.float32
    if isinstance(expected, Tensor):
        assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype} and {theirs.dtype}"
    if not theirs.numel():
        return
    ours, theirs = ours.detach().double(), theirs.detach().double()
    largest = theirs.abs().max().item() if scale is None else scale
    limit, found = apart(roundings, dtype) * largest, (ours - theirs).abs().max().item()
    assert found <= limit, (  # what is not a number is not alike
        f"{what or 'they'} differ by {found:.3g}, {found / (largest or 1):.2g} of the largest; "
        f"{roundings} roundings make {limit:.3g}"
    )


def assert_all_rounded_alike(actual, expected, roundings):
    """Check tensors by name, each against its own largest element; None is like None only."""
    assert actual.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = actual[name]
        assert (ours is None) == (theirs is None), f"{name}: one of them is None"
        if ours is not None and theirs is not None:
            assert_rounded_alike(ours, theirs, roundings, name)
