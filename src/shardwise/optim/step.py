"""The AdamW step on slices: torch's fused kernel, in cache-sized spans if moments are decoded.

Note [The same bits however a parameter is cut]
On a CPU torch's kernel works on 16 elements at once, and rounds a tensor's last elements
differently. So it gets slices in groups of 16 of the *whole* parameter. Groups that a rank has
whole are updated in place; partial groups at the ends of a slice are copied to separate memory. The
last group is as short as it is in the whole parameter. So each element is bit-identical to one
process with ``torch.optim.AdamW(fused=True)``.

Note [One pass over memory]
Moments in bfloat16 or 8 bits, and parameters and gradients in another dtype than the arithmetic,
are converted, updated and stored in spans of 128 Ki elements per thread: five arrays of 512 KiB,
which stay in a cache. So memory is read and written once. Shorter spans would fit in a faster
cache, but some twenty operations per span cost more than that saves: with 32 Ki elements a step
takes 1.5 times as long. Spans begin at multiples of `ROW` of the whole parameter, as blocks and
rows of random bits do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.offload.loads import cut_into_loads
from shardwise.offload.staging import Copies, DeviceLoad
from shardwise.optim.codes import Scratch
from shardwise.optim.kinds import ROW
from shardwise.optim.moments import MOMENTS, AsTheyAre, Held, Moments, Span, computed_in
from shardwise.optim.slices import Place, Slice, finish, keep
from shardwise.step.local_step import MakeHostMemory, Mirror, State

_GROUP = 16  # elements; a multiple of the kernel's vector on all CPUs
_ROWS_OF_THREAD = 4  # rows of a span per thread
_ROWS_ON_DEVICE = 128  # 4 Mi elements; no cache limits a span there


@dataclass(frozen=True)
class Settings:
    """Settings of one group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Work:
    """One parameter to update: its slice, both moments, and its step count with this step.

    ``copy`` is flat memory that also receives the new values, in the dtype of ``copy``. ``param``
    is the slice's parameter; the work may be on a part of the slice, from element ``begin`` on.
    """

    slice: Slice
    moments: tuple[Held, Held]
    step: torch.Tensor
    copy: torch.Tensor | None = None
    param: torch.Tensor | None = None
    begin: int = 0

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that a step changes, except the step count."""
        return [self.slice.param, *(each for held in self.moments for each in held.values())]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that a step reads."""
        return [*self.written, self.slice.grad]

    def part(self, kind: Moments, lo: int, hi: int) -> "Work":
        """Return the work on elements [lo, hi) of the slice."""
        mine, place = self.slice, self.slice.place
        first, second = (kind.part(held, Span(place.first, lo, hi, 0)) for held in self.moments)
        there = Place(place.first + lo, place.numel)
        inside = Slice(mine.param[lo:hi], mine.grad[lo:hi], there, None)
        return Work(inside, (first, second), self.step, None, self.param, lo)

    def with_state(self, state: State) -> "Work":
        """Return the work with ``state`` in place of moments, by parameter id and name."""
        moments = [
            {end: state.get((id(self.param), name + end), flat).view(-1) for end, flat in h.items()}
            for name, h in zip(MOMENTS, self.moments, strict=True)
        ]
        return replace(self, moments=(moments[0], moments[1]))

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> "Work":
        """Return the work with the next tensors of an iterator in place of `tensors`."""
        param = next(tensors)
        first, second = ({key: next(tensors) for key in held} for held in self.moments)
        inside = Slice(param, next(tensors), self.slice.place, None)
        return Work(inside, (first, second), self.step)


@dataclass(frozen=True)
class _Part:
    """Elements of a parameter from ``place.first`` on, for the kernel."""

    tensors: tuple[torch.Tensor, ...]  # parameter, gradient, both moments; one size and dtype
    place: Place
    step: torch.Tensor


def update(work: Sequence[Work], kind: Moments, settings: Settings) -> None:
    """Take a step. **Cost** one pass over memory; a few spans of memory for conversions."""
    direct, scratch = [], Scratch()
    for each in work:
        if not each.slice.param.numel():
            continue
        if _needs_no_conversion(each, kind):
            moments = (held[""] for held in each.moments)
            tensors = each.slice.param, each.slice.grad, *moments
            direct.append(_Part(tensors, each.slice.place, each.step))
        else:
            _update_in_spans(each, kind, settings, scratch)
    _run(direct, settings)
    finish([each.slice for each in work])


class PartOfStep:
    """The step of some parameters: the work and settings of each group.

    Call it once. Or run its `loads` through staging buffers, and call `write_back` when all are
    back.
    """

    def __init__(self, todo: Sequence[tuple[Sequence[Work], Moments, Settings]]) -> None:
        self._todo = [each for each in todo if each[0]]

    @torch.no_grad()
    def __call__(self) -> State:
        """Step. All state is updated in place, so nothing is returned."""
        for work, kind, settings in self._todo:
            torch._foreach_add_([each.step for each in work], 1)
            update(work, kind, settings)
        return {}

    def use_state(self, state: State) -> None:
        """Step with these tensors in place of some of the optimizer's state."""
        self._todo = [
            ([each.with_state(state) for each in work], kind, settings)
            for work, kind, settings in self._todo
        ]

    @torch.no_grad()
    def loads(
        self, num_bytes: int, mirror: Mirror, make_memory: MakeHostMemory
    ) -> Iterator[DeviceLoad]:
        """Yield the step as loads for staging buffers; see `PlainStep.loads`. Allocate nothing."""
        for work, kind, settings in self._todo:
            torch._foreach_add_([each.step for each in work], 1)
            yield from _loads(work, kind, settings, num_bytes, mirror)

    def write_back(self) -> None:
        """Copy the slices that are copies back into their parameters, after `loads`."""
        keep([each.slice for work, _, _ in self._todo for each in work])


def _loads(
    work: Sequence[Work],
    kind: Moments,
    settings: Settings,
    num_bytes: int,
    mirror: Mirror,
) -> Iterator[DeviceLoad]:
    """Yield steps of parts of slices, cut at multiples of `ROW`, so that blocks stay whole."""

    def load_of(parts: Sequence[Work]) -> DeviceLoad:
        def step(brought: list[torch.Tensor]) -> Copies:
            rest = iter(brought)
            there = [part.with_tensors(rest) for part in parts]
            update(there, kind, settings)
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            for part, done in zip(parts, there, strict=True):
                copies += zip(done.written, part.written, strict=True)
                assert part.param is not None
                kept = mirror(part.param)
                if kept is not None:
                    copies.append((done.slice.param, kept[part.begin :][: len(done.slice.param)]))
            return copies

        return DeviceLoad([each for part in parts for each in part.tensors], step)

    sizes = [
        (
            len(each.slice.param),
            sum(t.nbytes for t in each.tensors) // max(len(each.slice.param), 1),
            each.slice.place.first,
        )
        for each in work
    ]
    for pieces in cut_into_loads(sizes, ROW, num_bytes):
        yield load_of([work[number].part(kind, lo, hi) for number, lo, hi in pieces])


def spans(place: Place, like: torch.Tensor, step: int) -> Iterator[Span]:
    """Yield the spans of a slice; see Note [One pass over memory]."""
    on_cpu = like.device.type == "cpu"
    length = ROW * (_ROWS_OF_THREAD * torch.get_num_threads() if on_cpu else _ROWS_ON_DEVICE)
    lo, numel = 0, like.numel()
    while lo < numel:
        hi = min(numel, lo + length - (place.first + lo) % ROW)
        yield Span(place.first, lo, hi, step)
        lo = hi


def _needs_no_conversion(work: Work, kind: Moments) -> bool:
    dtype = work.slice.param.dtype
    is_one_dtype = work.slice.grad.dtype == dtype == computed_in(dtype)
    return is_one_dtype and work.copy is None and isinstance(kind, AsTheyAre)


def _update_in_spans(work: Work, kind: Moments, settings: Settings, scratch: Scratch) -> None:
    param, grad, dtype = work.slice.param, work.slice.grad, computed_in(work.slice.param.dtype)
    place = work.slice.place
    for span in spans(place, param, int(work.step)):
        inside = slice(span.lo, span.hi)
        values = scratch.converted("param", param[inside], dtype)
        kept = [
            scratch.converted(f"{which}", kind.read(held, span, which, scratch), dtype)
            for which, held in enumerate(work.moments)
        ]
        tensors = values, scratch.converted("grad", grad[inside], dtype), *kept
        _run([_Part(tensors, Place(span.first + span.lo, place.numel), work.step)], settings)
        for which, held in enumerate(work.moments):
            kind.write(kept[which], held, span, which, scratch)
        if param.dtype != dtype:
            param[inside] = values
        if work.copy is not None:
            work.copy[inside] = values


def _run(parts: Sequence[_Part], settings: Settings) -> None:
    """Run the kernel on parts, in groups; see Note [The same bits however a parameter is cut]."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[_Part]] = {}
    copies: list[tuple[_Part, torch.Tensor, int, int, int]] = []
    for part in parts:
        first = part.tensors[0]
        found = by_kind.setdefault((first.device, first.dtype), [])
        begin, end, numel = part.place.first, part.place.first + len(first), part.place.numel
        lo, hi = -(-begin // _GROUP) * _GROUP, end if end == numel else end // _GROUP * _GROUP
        if first.device.type != "cpu" or (begin, end) == (lo, hi):
            found.append(part)
            continue
        if lo < hi:
            inner = tuple(t[lo - begin : hi - begin] for t in part.tensors)
            found.append(_Part(inner, Place(lo, numel), part.step))
        for at, to in {(begin, min(lo, end)), (max(hi, begin), end)}:
            if at < to:
                group = at // _GROUP * _GROUP
                memory = first.new_zeros(4, min(_GROUP, numel - group))
                for row, tensor in zip(memory, part.tensors, strict=True):
                    row[at - group : to - group] = tensor[at - begin : to - begin]
                copies.append((part, memory, at, to, group))
                found.append(_Part(tuple(memory), Place(group, numel), part.step))
    for of_kind in by_kind.values():
        _kernel(of_kind, settings)
    for part, memory, at, to, group in copies:
        begin = part.place.first
        for row, tensor in zip(memory, part.tensors, strict=True):
            tensor[at - begin : to - begin] = row[at - group : to - group]


def _kernel(parts: Sequence[_Part], settings: Settings) -> None:
    params, grads, exp_avgs, exp_avg_sqs = (
        list(each) for each in zip(*(p.tensors for p in parts), strict=True)
    )
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [part.step.to(params[0].device, non_blocking=True) for part in parts],
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
    )
