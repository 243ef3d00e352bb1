"""Call all that torch lets a subclass override on a ShardTensor, and look for local answers.

Each call is made on plain tensors first. On ShardTensors it must then raise (and change nothing),
or give the same answer and make the same changes; nothing in between.
"""

from collections import Counter
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name

from ranks import run_ranks
from roundings import apart
from shardwise import ShardTensor, shard
from shardwise.errors import ShardwiseError
from shardwise.tensor.totals import LazyNorm

# These change the process, ask for other devices, tell where memory lies or leave it undefined, or
# have tests of their own. torch's chain_matmul forgets out= before it asks a subclass.
LEFT_OUT = """
__deepcopy__ __delete__ __dlpack__ __dlpack_device__ __format__ __hash__ __reduce__ __reduce_ex__
__repr__ __set__ __setstate__ __torch_function__ _typed_storage backward chain_matmul
const_data_ptr cuda data_ptr empty_like fbgemm_pack_gemm_matrix_fp16 hpu ipu lobpcg mtia
pin_memory register_hook register_post_accumulate_grad_hook share_memory_ slice_inverse storage
storage_offset to_mkldnn untyped_storage xpu
"""
# Of no other tensor do these have to be the same: where it lies, and how autograd sees it.
LEFT_OUT_PROPERTIES = """
_backward_hooks _base _cdata _grad _grad_fn _post_accumulate_grad_hooks _version data grad grad_fn
output_nr is_leaf requires_grad retains_grad _python_dispatch name volatile
"""

FULL = torch.linspace(0.1, 0.9, 16).reshape(4, 4).sin()
OTHER = torch.linspace(0.9, 0.2, 16).reshape(4, 4)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def index():
    return torch.tensor([1, 0, 2, 3])


def indices():
    return (OTHER * 4).long()


# What is tried for every function; t and u are ShardTensors (or plain), f is always plain.
CALLS = [
    lambda t, u, f: ((t,), {}),
    lambda t, u, f: ((t, 2), {}),
    lambda t, u, f: ((t, 0), {}),
    lambda t, u, f: ((t, 0, 1), {}),
    lambda t, u, f: ((t, 0.5), {}),
    lambda t, u, f: ((t, 0.1, 0.9), {}),
    lambda t, u, f: ((t, u), {}),
    lambda t, u, f: ((t, f), {}),
    lambda t, u, f: ((f, t), {}),
    lambda t, u, f: ((t, f[0]), {}),
    lambda t, u, f: ((t, f[:, :1]), {}),
    lambda t, u, f: ((t, f[:1, :1]), {}),
    lambda t, u, f: ((t, u, t), {}),
    lambda t, u, f: ((t, f, f), {}),
    lambda t, u, f: ((f, t, f), {}),
    lambda t, u, f: ((t, 0.5, u), {}),
    lambda t, u, f: ((t, f > 0.5), {}),
    lambda t, u, f: ((t, f > 0.5, 0.25), {}),
    lambda t, u, f: ((f > 0.5, t, u), {}),
    lambda t, u, f: ((f > 0.5, t, f), {}),
    lambda t, u, f: ((t > 0.5, t, u), {}),
    lambda t, u, f: ((t > 0.5, f, f), {}),
    lambda t, u, f: ((t, t > 0.5, 0.25), {}),
    lambda t, u, f: ((t, index()), {}),
    lambda t, u, f: ((index(), t), {}),
    lambda t, u, f: ((t, (0, 1)), {}),
    lambda t, u, f: ((t, (-1,)), {}),
    lambda t, u, f: ((t, (4, 4)), {}),
    lambda t, u, f: ((t, 0, index()), {}),
    lambda t, u, f: ((t, 0, index(), 0.5), {}),
    lambda t, u, f: ((t, 0, index(), f), {}),
    lambda t, u, f: ((t, 0, indices()), {}),
    lambda t, u, f: ((t, 0, indices(), f), {}),
    lambda t, u, f: ((t, 0, 0.5), {}),
    lambda t, u, f: ((t, torch.float64), {}),
    lambda t, u, f: ((t, (index(),), f), {}),
    lambda t, u, f: ((t,), {"dim": 0}),
    lambda t, u, f: ((t,), {"dim": 1, "keepdim": True}),
    lambda t, u, f: ((t,), {"dtype": torch.float64}),
    lambda t, u, f: ((t,), {"inplace": True}),
    lambda t, u, f: (([t, u],), {}),
    lambda t, u, f: (([t, f],), {}),
    lambda t, u, f: (([t, u], [u, t]), {}),
    lambda t, u, f: (([t, u], [f, f]), {}),
    lambda t, u, f: (([f, f], [t, u]), {}),
    lambda t, u, f: (([t, u], 0.5), {}),
    lambda t, u, f: (([t, u], [u, t], [t, u]), {}),
    lambda t, u, f: (([t, u], [0.5, 2.0]), {}),
    lambda t, u, f: (("ij,kj->ik", t, u), {}),
    lambda t, u, f: ((t,), {"out": u}),
    lambda t, u, f: ((f,), {"out": t}),
    lambda t, u, f: ((f, f), {"out": t}),
    lambda t, u, f: ((t, u), {"out": f}),
    lambda t, u, f: ((), {"tensor": t}),
]


def overridable():
    """Yield (name, function) of all that torch lets a subclass override."""
    seen = set()
    for functions in get_overridable_functions().values():
        for function in functions:
            name = function.__name__
            label = resolve_name(function) or name
            if name == "__get__":
                name = getattr(function.__self__, "__name__", "?")
                if name in LEFT_OUT_PROPERTIES.split():
                    continue
                label = f"Tensor.{name}"
            if "_polynomial_" in name:  # loops as many times as its argument says
                continue
            if function not in seen and name not in LEFT_OUT.split():
                seen.add(function)
                yield label, function

    for module in (torch, nn.functional):  # that torch does not list
        for name in sorted(vars(module)):
            in_place = name.endswith("_") and not name.startswith("_")
            if (in_place or name.startswith("_foreach_")) and name not in LEFT_OUT.split():
                function = getattr(module, name)
                if callable(function) and function not in seen:
                    seen.add(function)
                    yield f"{module.__name__}.{name}", function


def attempt(function, call):
    torch.default_generator.manual_seed(1)  # torch.manual_seed walks the stack for each device
    args, kwargs = call
    return function(*args, **kwargs)


def calls_that_work_on_plain_tensors(every=1):
    found = []
    for index, (label, function) in enumerate(overridable()):
        for number, make in enumerate(CALLS):
            if (index * len(CALLS) + number) % every:
                continue
            try:
                attempt(function, make(FULL.clone(), OTHER.clone(), OTHER.clone()))
            except BaseException:
                continue
            found.append((index, label, number))
    return found


def leaves(value, known=MappingProxyType({})):
    """Yield what is in nested lists and tuples, tensors whole and plain; some are known by id."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, known)
    elif isinstance(value, LazyNorm):
        yield value.resolve()
    elif isinstance(value, ShardTensor):
        yield known[id(value)] if id(value) in known else value.full_tensor()
    elif isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            yield value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    else:
        yield value


def agree(one, other, known=MappingProxyType({})):
    ours, theirs = list(leaves(one, known)), list(leaves(other))
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def same_bits(ours, theirs):
    alike = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return alike and torch.equal(ours, theirs)


def _same(ours, theirs):
    if not isinstance(theirs, Tensor):
        plain = isinstance(theirs, int | float | complex | bool | str | torch.dtype | torch.device)
        return ours == theirs or ours != ours if plain else type(ours) is type(theirs)
    if not isinstance(ours, Tensor) or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if ours.is_quantized or (ours.dtype.itemsize == 1 and ours.dtype.is_floating_point):
        return True
    if ours.dtype == torch.complex32:  # which torch cannot compare
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    if torch.equal(ours, theirs):
        return True
    # Sixteen elements near 1: no function of them has a hundred roundings.
    return torch.allclose(ours, theirs, rtol=apart(100), atol=apart(100), equal_nan=True)


def answers_of_plain_parameters(function, make, grads):
    """Yield what plain tensors answer, or raise, at each place in memory that kernels tell apart.

    A slice begins at any element, and the full parameter with it.
    """
    for offset in range(4):
        plain = [torch.empty(offset + FULL.numel())[offset:].view_as(FULL) for _ in range(2)]
        for tensor, values in zip(plain, (FULL, OTHER), strict=True):
            tensor.copy_(values).requires_grad_(grads)
        try:
            with torch.set_grad_enabled(grads):
                answer = attempt(function, make(*plain, OTHER.clone()))
        except Exception as error:
            answer = error
        yield answer


class Sweep:
    """The tensors that calls are tried on, and what was found."""

    def __init__(self, layout, what, stage=3):
        self.what = what
        self.records = torch.is_grad_enabled() and what == "parameter"
        self.model = nn.Module()
        self.model.odd = nn.Parameter(torch.ones(3))  # flat slices begin inside a row, then
        self.model.t = nn.Parameter(FULL.clone())
        self.model.u = nn.Parameter(OTHER.clone())
        shard(self.model, stage=stage, layout=layout)
        self.stained = True  # by a call that wrote or raised
        self.cells = Counter()  # right, refused, raised in words not of ours, wrong
        self.raised = []
        self.offenders = []
        self.model.t.grad, self.model.u.grad = FULL, OTHER
        self.grads = [self.model.t.grad, self.model.u.grad]
        # What this rank has of FULL and OTHER: to compare it with these bits, nothing is sent.
        self.locals = [p.to_local().detach().clone() for p in (self.model.t, self.model.u)]
        assert agree([self.model.t, self.model.u, *self.grads], [FULL, OTHER, FULL, OTHER])

    @torch.no_grad()
    def fresh(self):
        if self.what == "gradient":
            return self.grads[0].clone(), self.grads[1].clone()
        if self.stained:
            self.model.t.copy_(FULL)
            self.model.u.copy_(OTHER)
            self.stained = False
        return self.model.t, self.model.u

    def untouched(self, t, u):
        """Tell whether every bit that this rank has of t and u is what it was."""
        whole = all((x.shape, x.dtype) == (FULL.shape, FULL.dtype) for x in (t, u))
        return whole and all(map(same_bits, (t.to_local(), u.to_local()), self.locals))

    def is_of_torch(self, error, function, make):
        """Tell whether torch refuses the call for a plain parameter, too, by the same class."""
        answers = answers_of_plain_parameters(function, make, self.records)
        return any(type(answer) is type(error) for answer in answers)

    def run(self, label, function, number):
        where = f"{label}, call {number}"
        make = CALLS[number]
        plain_t, plain_u = FULL.clone(), OTHER.clone()
        plain = make(plain_t, plain_u, OTHER.clone())
        expected = attempt(function, plain)
        writes = not (same_bits(plain_t, FULL) and same_bits(plain_u, OTHER))
        t, u = self.fresh()
        call = make(t, u, OTHER.clone())
        ours, error = None, None
        try:
            ours = attempt(function, call)
        except Exception as caught:
            error = caught
        with torch.no_grad():
            num_raised = torch.tensor(int(error is not None))
            dist.all_reduce(num_raised)  # what one rank alone raises would stop the other for good
            self.stained = writes or num_raised > 0 or not self.untouched(t, u)
            num_wrong = len(self.offenders)
            if 0 < num_raised < dist.get_world_size():
                self.offenders.append(f"{where}: one rank raised {error!r:.80}")
            elif error is not None:
                is_refused = isinstance(error, ShardwiseError) or self.is_of_torch(
                    error, function, make
                )
                self.cells["refused" if is_refused else "raw error"] += 1
                if not is_refused:
                    self.raised.append(f"{where}: {error!r:.120}")
                if not self.untouched(t, u):
                    self.offenders.append(f"{where}: changed, then raised {error!r:.60}")
            else:
                inputs = [*call[0], *call[1].values()]
                answers = agree(ours, expected)
                known = {} if writes else {id(t): FULL, id(u): OTHER}
                changes = agree(inputs, [*plain[0], *plain[1].values()], known)
                changes = changes and (writes or self.untouched(t, u))
                if not answers and not any(
                    agree(ours, answer)
                    for answer in answers_of_plain_parameters(function, make, grads=False)
                    if not isinstance(answer, Exception)
                ):
                    self.offenders.append(f"{where}: {type(ours).__name__} differs")
                elif not changes:
                    self.offenders.append(f"{where}: a change of an argument was lost")
                else:
                    self.cells["right"] += 1
            self.cells["wrong"] += len(self.offenders) > num_wrong


WAYS = (
    ("rows", "gradient", False),
    ("rows", "parameter", True),
    ("flat", "gradient", True),
    ("flat", "parameter", False),
    ("matrices", "gradient", False),
)


def sweep(rank, world_size, layout, what, grads, trials, stage=3):
    functions = list(overridable())
    with torch.set_grad_enabled(grads):
        tried = Sweep(layout, what, stage)
        for index, label, number in trials:
            name, function = functions[index]
            assert name == label
            tried.run(label, function, number)
    return tried.offenders, tried.cells, tried.raised


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_function_of_torch_gives_a_local_answer():
    trials = calls_that_work_on_plain_tensors()
    assert len(trials) > 1000
    check_sweep([trials[number :: len(WAYS)] for number in range(len(WAYS))])


@pytest.mark.filterwarnings("ignore")
def test_sampled_functions_are_right_or_refused_where_a_rank_has_nothing():
    trials = calls_that_work_on_plain_tensors(every=149)
    for stage, what in ((0, "gradient"), (3, "parameter"), (3, "gradient")):
        first, *_, last = run_ranks(sweep, 3, "rows", what, False, trials, stage)
        assert not first[0] and not last[0], f"stage {stage}, {what}: {first[0]} {last[0]}"


def check_sweep(shares):
    """Sweep over calls: a share for each pair of a layout and a kind of tensor."""
    for trials, (layout, what, grads) in zip(shares, WAYS, strict=True):
        first, second = run_ranks(sweep, 2, layout, what, grads, trials)
        offenders = first[0] + [f"rank 1: {o}" for o in second[0] if o not in first[0]]
        assert not offenders, f"{layout}, {what}:\n" + "\n".join(offenders)
        assert len(trials) // 20 < first[1]["refused"] < len(trials)
