"""One optimizer class on sharded models, compared with one process; what ranks call.

Note [Gradients whose mean is exact]
Each gradient is rounded to the 8 bits of bfloat16 in the backward pass, and all ranks have the same
batch. So the sum over up to 256 ranks and their mean are exact, and every rank's optimizer has the
gradients of the oracle, to the bit, at any number of ranks.

Note [Rounding or wrong]
A sum in another order differs by its roundings. What differs in float32 runs again in float64, if
the class does: there roundings shrink by 2^29, and so does what they are enlarged by (divisions by
small numbers, iterations), while a wrong step stays as wrong as it was. In a step each element is
rounded a few times, and a few sums go over all elements of the model. Some classes round to float32
inside. So the bound is ``apart(STEPS * 4 * NUMEL)`` of float32, 4e-5, of the parameter's largest
change. `_INSIDE` has classes that round gradients to bfloat16 inside, and whose gradients are not
those of Note [Gradients whose mean is exact], as they keep a share of them: bfloat16 rounds a
last bit the other way. The bound is two such roundings of each step.

Note [Codes]
Optimizers with 8-bit state quantise blocks of a rank's slice. Where blocks are not those of one
process, their scales differ, and codes with them. Such a step may be as far from one process as
the codes themselves move it: twice the distance between the class and its twin with 32-bit state,
in one process.
"""

import contextlib
import io
import random
import re
import traceback
import warnings
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F

import shardwise
from optimizer_classes import OptimizerClass, make, needs_closure, needs_graph_of_gradients
from roundings import apart
from shardwise.errors import ShardwiseError

STEPS = 6
RIGHT = ("bits", "rounding", "codes")


class _Coarse(torch.autograd.Function):
    """The identity; rounds the gradient to bfloat16. Note [Gradients whose mean is exact]."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().to(grad.dtype)


coarse = _Coarse.apply


class Conv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, coarse(self.weight), coarse(self.bias))


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, coarse(self.weight), None if self.bias is None else coarse(self.bias))


class Norm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, coarse(self.weight), coarse(self.bias))


class Odd(nn.Module):
    """7 x 9 twice, 5 x 3, a convolution, vectors, one row, a scalar: some ranks have none of it.

    ``large``: and 192 x 80, which 8-bit optimizers quantise. ``vector``: the scalar has one dim, as
    torch's fully_shard wants it.
    """

    def __init__(self, large=False, vector=False):
        super().__init__()
        self.conv = Conv(2, 4, 3)
        self.up, self.again = Linear(9, 7), Linear(9, 7, bias=False)
        self.norm = Norm(7)
        self.out = Linear(3, 5, bias=False)
        self.row = nn.Parameter(torch.randn(1, 5))
        self.scale = nn.Parameter(torch.full((1,) if vector else (), 1.5))
        self.wide = Linear(80, 192, bias=False) if large else None

    def forward(self, x):
        hidden = torch.tanh(self.conv(x).mean(1).flatten(1))
        hidden = self.norm(self.up(hidden) + self.again(hidden))
        out = self.out(hidden[:, :3] + hidden[:, 3:6]) * coarse(self.row) * coarse(self.scale)
        if self.wide is not None:
            out = out + self.wide(x.flatten(1).repeat(1, 2)[:, :80]).mean(1, keepdim=True)
        return out


_TWINS = {
    r"bitsandbytes\.(\w+?)(8bit)?": r"bitsandbytes.\g<1>32bit",
    r"torchao\.(Adam|AdamW)(8bit|4bit|Fp8)": r"torch.\g<1>",
}


def _twin(which):
    """Return the class with the same steps and 32-bit state; see Note [Codes]."""
    for pattern, twin in _TWINS.items():
        if re.fullmatch(pattern, str(which)):
            return which_of(re.sub(pattern, twin, str(which)))
    return None


NUMEL = sum(p.numel() for p in Odd().parameters())
# The first set that a class takes. Some gather matrices of one shape by themselves.
PARAMETERS = ("all", "without the scalar", "matrices", "matrices of one shape")


@dataclass
class Outcome:
    """How one class did in one case."""

    verdict: str
    message: str = ""
    warning: str = ""
    difference: float = 0.0  # of the largest change
    where: str = ""  # the last lines of a traceback, or the parameter that differs most

    def as_json(self):
        return {key: value for key, value in asdict(self).items() if value}


CASES = {
    "stage 0": {"stage": 0},
    "stage 1 rows": {"stage": 1},
    "stage 3 rows": {"stage": 3},
    "stage 3 flat": {"stage": 3, "layout": "flat"},
    "stage 3 matrices": {"stage": 3, "layout": "matrices"},
    "stage 3 rows, scalar of one dim": {"stage": 3},
    "fully_shard": None,
    "torch's fully_shard": None,
}


def _has_vector(case):
    """Tell whether the scalar has one dim: torch's fully_shard takes no other."""
    return CASES[case] is None or case.endswith("of one dim")


def _seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _chosen(model, which_parameters):
    """Return the parameters that are trained; the others are frozen."""
    takes = {
        "all": lambda param: True,
        "without the scalar": lambda param: param.ndim > 0,
        "matrices": lambda param: param.ndim == 2,
        "matrices of one shape": lambda param: param.shape == (7, 9),
    }
    for param in model.parameters():
        param.requires_grad_(takes[which_parameters](param))
    return [p for p in model.parameters() if p.requires_grad]


def _make_model(dtype, *shapes):
    torch.manual_seed(3)
    return Odd(*shapes).to(dtype)


def _batch(step, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(4, 2, 5, 5, generator=generator).to(dtype)


def _train(which, model, params, dtype, wrap=lambda optimizer: optimizer):
    """Take the steps; return the parameters after the first and the last."""
    optimizer = make(which, params, model)
    optimizer = wrap(optimizer)
    train_mode = getattr(optimizer, "train", None)
    if callable(train_mode) and "schedule" in type(optimizer).__name__.lower():
        train_mode()
    snapshots = []
    for step in range(STEPS):
        batch = _batch(step, dtype)

        @torch.enable_grad()
        def gradients(batch=batch):
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward(create_graph=needs_graph_of_gradients(which))
            return loss.detach()

        gradients()
        if needs_closure(which):
            optimizer.step(gradients)
        else:
            optimizer.step()
        if step in (0, STEPS - 1):
            snapshots.append({name: _whole(p) for name, p in model.named_parameters()})
    with torch.no_grad():
        model(batch)  # which finds what ranks do differently
    return snapshots


def _whole(param):
    if hasattr(param, "full_tensor"):
        return param.full_tensor().detach().clone()
    return param.detach().clone()


@cache
def _oracle(which, dtype, which_parameters, large, vector=False):
    model = _make_model(dtype, large, vector)
    params = _chosen(model, which_parameters)
    _seed(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _eager():
        return before, _train(which, model, params, dtype)


@contextlib.contextmanager
def _eager():
    """Run uncompiled, as docs/how-to/optimizers.md says for optimizers that compile their step."""
    silent = contextlib.redirect_stdout(io.StringIO())
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(), silent:
        warnings.simplefilter("ignore")
        yield


def alone(rank, world_size, which, large):
    """Return the parameters that a class steps in a plain model, or the reason why it steps none.

    Also whether it changes them, and runs in float64.
    """
    reason = ""
    for which_parameters in PARAMETERS:
        try:
            before, (_, after) = _oracle(which, torch.float32, which_parameters, large)
        except Exception as error:
            reason = f"raises alone: {type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        change = max(float((after[n] - before[n]).abs().max()) for n in before)
        is_finite = all(bool(value.isfinite().all()) for value in after.values())
        if not is_finite or change < 1e-4:
            reason = f"after {STEPS} steps alone: largest change {change:.1g}, finite {is_finite}"
            continue
        try:
            _oracle(which, torch.float64, which_parameters, large)
            runs_in_64 = True
        except Exception:
            runs_in_64 = False
        return {"parameters": which_parameters, "float64": runs_in_64}
    return {"reason": reason}


def run_case(rank, world_size, which, case, facts, large, gathering=False):
    """Run one case on this rank; return its outcome."""
    given = rank, which, case, facts["parameters"]
    outcome = _compared(*given, torch.float32, large, gathering)
    verdicts = [None] * world_size
    dist.all_gather_object(verdicts, outcome.verdict)  # all ranks run again, or none
    if facts["float64"] and {"rounding", "differs"} & {*verdicts}:
        if set(verdicts) - {"bits", "rounding", "differs"}:
            return Outcome("ERROR", f"not the same on all ranks: {verdicts}").as_json()
        outcome = _compared(*given, torch.float64, large, gathering)
        if outcome.verdict == "bits":
            outcome.verdict = "rounding"
    if outcome.verdict == "differs":
        outcome.verdict = "WRONG"
        if large and (twin := _twin(which)) is not None:
            outcome.verdict = _within_codes(which, twin, case, facts["parameters"], outcome)
    return outcome.as_json()


def _within_codes(which, twin, case, which_parameters, outcome):
    """Return "codes" if the steps are no further off than codes are; see Note [Codes]."""
    shapes = which_parameters, True, _has_vector(case)
    before, (_, codes) = _oracle(which, torch.float32, *shapes)
    _, (_, plain) = _oracle(twin, torch.float32, *shapes)
    moved = max(
        float((codes[n] - plain[n]).abs().max() / ((codes[n] - before[n]).abs().max() or 1.0))
        for n in before
    )
    return "codes" if outcome.difference <= 2 * moved else "WRONG"


def _compared(rank, which, case, which_parameters, dtype, large, gathering):
    before, expected = _oracle(which, dtype, which_parameters, large, _has_vector(case))
    told: list[warnings.WarningMessage] = []
    try:
        with _eager(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = _sharded_run(rank, which, case, which_parameters, dtype, large, gathering)
    except ShardwiseError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}", _warned(told))
    except Exception as error:
        lines = traceback.format_exception(error)
        text = f"{type(error).__name__}: {error}".splitlines()[0][:400]
        return Outcome("ERROR", text, _warned(told), where="".join(lines)[-1500:])
    outcome = _compare(which, before, expected[1], found[1])
    first = _compare(which, before, expected[0], found[0])
    if outcome.verdict == "differs":
        outcome.message = f"after one step: {first.difference:.2g} ({first.where or 'same'})"
    outcome.warning = _warned(told)
    return outcome


def _warned(told):
    texts = {str(each.message) for each in told}
    return "; ".join(sorted(text for text in texts if "shardwise" in text.lower()))[:500]


def _sharded_run(rank, which, case, which_parameters, dtype, large, gathering):
    model = _make_model(dtype, large, _has_vector(case))
    _chosen(model, which_parameters)
    _seed(rank)  # what an optimizer draws must not depend on the rank
    how = CASES[case]
    if case == "torch's fully_shard":
        torch_fully_shard(model)
    elif how is None:
        shardwise.fully_shard(model)
    else:
        model = shardwise.shard(model, **how)
    wrap = {"wrap": shardwise.optim.gathering} if gathering else {}
    params = [p for p in model.parameters() if p.requires_grad]
    return _train(which, model, params, dtype, **wrap)


_INSIDE = {"pytorch_optimizer.SCIONLight": torch.bfloat16}


def _compare(which, before, expected, found):
    """Compare parameters; see Note [Rounding or wrong]."""
    outcome = Outcome("bits")
    inside = _INSIDE.get(str(which))
    bound = apart(STEPS * 4 * NUMEL) if inside is None else apart(2 * STEPS, inside)
    for name, theirs in expected.items():
        ours = found[name]
        if torch.equal(ours, theirs):
            continue
        change = float((theirs - before[name]).abs().max())
        distance = float((ours - theirs).abs().max())
        limit = bound * change
        verdict = "rounding" if distance <= limit else "differs"
        relative = distance / (change or 1.0)
        if verdict == "differs" or outcome.verdict == "bits":
            outcome.verdict = verdict
        if not relative <= outcome.difference:
            outcome.difference, outcome.where = relative, name
    return outcome


def named_remedies(message: str) -> list[str]:
    """Return the ways out that a refusal names, of those that a case can follow."""
    ways = {
        "matrices": r"layout=['\"]matrices['\"]",
        "rows": r"layout=['\"]rows['\"]",
        "stage 0": r"stage=0",
        "gathering": r"gathering\(",
        "DDP": r"DistributedDataParallel",
        "the class for one process": r"SingleDevice",
    }
    if "SingleDevice" in message:  # the layout is that of the other class
        ways.pop("matrices")
    return [name for name, pattern in ways.items() if re.search(pattern, message)]


def which_of(text: str) -> OptimizerClass:
    """Return the class of ``package.Name``."""
    return OptimizerClass(*text.rsplit(".", 1))
