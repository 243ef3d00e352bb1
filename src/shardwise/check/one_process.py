"""Comparison of a composed model's gradients with those of one process on the whole batch.

Note [How gradients are compared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A gradient g of the composed model is written as s q + r, where q is that of one process and s makes
r as short as possible. Rounding leaves s near 1 and r short: both within the square root of the
dtype's eps (half of its digits). This is far above the error of sums in another order, and far
below the smallest factor of a wrong divisor. If r is short and s is not 1, only the scale is wrong,
and s is searched among the degrees of parallelism, their products and powers of two. If r is long,
terms are missing or counted twice.

A gradient may be zero except for rounding (such as the bias of attention's keys), and then it is
noise. So gradients closer than four roundings of the largest gradient (root mean square over its
elements) count as equal for any s. In bf16 that is 3 % of it: check small models in fp32.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import combinations
from math import isfinite, log2, sqrt
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.axes import Axes
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.comm.control import Control, exchange_any
from shardwise.engine.api import find_engine, shard
from shardwise.errors import ConfigError, GradientError
from shardwise.mesh import resolve_axes
from shardwise.parallel.accumulate import accumulate
from shardwise.parallel.parts import Model, Parts, modules_of
from shardwise.parallel.tying import ties_of
from shardwise.tensor.plain_state import owner_of

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_MAX_SHOWN = 12


@dataclass(frozen=True)
class GradientCheck:
    """One parameter: ``scale`` and ``rest`` are s and |r| / |g| of Note [How ... compared].

    ``missing`` is the side without a gradient: "composed" or "one process". ``is_rounding``: the
    difference is within roundings of the largest gradient, and ``rest`` is relative to that
    gradient.
    """

    name: str
    scale: float = 1.0
    rest: float = 0.0
    missing: str | None = None
    is_rounding: bool = False

    def is_right(self, tolerance: float) -> bool:
        """Return True if the two differ by rounding only."""
        if self.is_rounding:
            return True
        return self.missing is None and abs(self.scale - 1) <= tolerance >= self.rest


@dataclass(frozen=True)
class GradientReport:
    """All comparisons; ``tolerance`` is relative, ``degrees`` are those of parallelism."""

    checks: tuple[GradientCheck, ...]
    tolerance: float
    degrees: Mapping[str, int]

    @property
    def wrong(self) -> tuple[GradientCheck, ...]:
        """The parameters whose gradients differ from those of one process."""
        return tuple(c for c in self.checks if not c.is_right(self.tolerance))

    def __str__(self) -> str:
        """Describe each error and possible reasons, with similar parameters in one line."""
        if not self.wrong:
            most = max((max(abs(c.scale - 1), c.rest) for c in self.checks), default=0.0)
            return (
                f"{len(self.checks)} gradients are those of one process with the whole batch; the "
                f"largest difference is {most:.1e} (allowed: {self.tolerance:.1e})"
            )
        # Parameters whose names differ only in numbers and that have the same error.
        similar: dict[tuple[str, str], list[str]] = {}
        for check in self.wrong:
            pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", check.name)
            similar.setdefault((pattern, self._describe_error(check)), []).append(check.name)
        lines = [
            f"{pattern if len(names) > 1 else names[0]}"
            f"{f' ({len(names)} parameters)' if len(names) > 1 else ''}: {error}"
            for (pattern, error), names in similar.items()
        ]
        left = len(lines) - _MAX_SHOWN
        lines = [*lines[:_MAX_SHOWN], *([f"and {left} more kinds"] if left > 0 else [])]
        return "\n".join([f"{len(self.wrong)} of {len(self.checks)} gradients are wrong:", *lines])

    def _describe_error(self, check: GradientCheck) -> str:
        if check.missing == "composed":
            return "there is no gradient; in one process there is"
        if check.missing is not None:
            return "there is a gradient; in one process there is none"
        if not isfinite(check.rest):
            return "the gradient has elements that are not finite"
        if check.rest > self.tolerance:
            return (
                "the gradient is no multiple of the right one: a rank's batch is left out or "
                "counted twice, or a partial gradient was not summed"
            )
        if not check.scale:
            return "the gradient is zero; in one process it is not"
        if check.scale < 0:
            return f"the gradient is {check.scale:.4g} times the right one: its sign is wrong"
        larger = check.scale > 1
        factor = check.scale if larger else 1 / check.scale
        error = f"the gradient is {factor:.4g} times too {'large' if larger else 'small'}"
        reasons = list(self._reasons(factor, larger))
        return f"{error}: {'; or '.join(reasons)}" if reasons else error

    def _reasons(self, factor: float, larger: bool) -> Iterator[str]:
        degrees = {name: n for name, n in self.degrees.items() if n > 1}
        singles = [name for name, n in degrees.items() if self._is_near(factor, n)]
        for name in singles:
            yield f"{factor:.0f} is {name}{_HINTS.get((name, larger), '')}"
        data = degrees.get("data-parallel ranks", 1)
        efsdp = self.degrees.get("efsdp", 1)
        if larger and efsdp < data and self._is_near(factor, data / efsdp):
            yield f"divided by efsdp = {efsdp} where there are {data} data-parallel ranks"
        if not singles:
            for (a, m), (b, n) in combinations(degrees.items(), 2):
                if self._is_near(factor, m * n):
                    yield f"{factor:.0f} is {a} x {b}"
            power = round(log2(factor))
            if power and self._is_near(factor, 2.0**power):
                yield f"{factor:.0f} is 2^{power}: doubled {power} times"

    def _is_near(self, factor: float, number: float) -> bool:
        return abs(factor / number - 1) <= self.tolerance


_HINTS = {
    ("data-parallel ranks", True): ": summed and not divided",
    ("data-parallel ranks", False): ": divided twice",
    ("micro-batches", True): ": the loss of each is to be divided by their number",
    ("micro-batches", False): ": divided twice, or the last one alone was kept",
    ("tp", True): ": each rank's gradient was whole, and they were summed",
    ("cp", False): ": the loss is a mean over a rank's own tokens, and was divided again",
}


def check_gradients(
    make_model: Callable[[], nn.Module],
    batch: Any,
    mesh: Axes | DeviceMesh | None = None,
    *,
    compose: Callable[[nn.Module], Model] | None = None,
    run: Callable[[Any, Any], object] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    local_batch: Callable[[Any], Any] | None = None,
    micro_batches: int = 1,
) -> GradientReport:
    """Compare one pass of a composed model with one process that sees the whole batch.

    Every rank calls it with the same arguments. ``compose`` turns a plain model into the model to
    train (tensor parallelism, `shard`, `fully_shard`, torch's too); the default is
    ``shard(model, mesh=mesh)``. ``batch`` has tensors whose rows are divided over the data-parallel
    ranks of ``mesh``, and then into ``micro_batches``; ``local_batch`` takes this rank's part
    instead. ``loss(model, batch)`` must be a mean over its batch; the default is the output's
    ``.loss``, or the mean square of the output. Turn randomness (dropout) off. Both models get the
    composed model's weights. `shard` takes one rank's weights for all; with any other composition
    ``make_model`` must make the same weights on every rank (seed it).

    For a pipeline ``compose`` returns this rank's stage, or a list of its stages, with layer names
    of the whole model. ``run(stages, batch)`` runs one step of the schedule over this rank's part
    of the batch; ``micro_batches`` is its number of micro-batches, for the explanations. The
    schedule's ``loss_fn`` must compute the same as ``loss``.

    **Cost** a plain model and its gradients on every rank, and one full gradient at a time.

    **Raises** GradientError on all ranks if any gradient is wrong, with its name, error and
    possible factor; ConfigError for batches that cannot be divided, and for encoded messages.
    """
    plain = make_model()
    composed = shard(make_model(), mesh=mesh) if compose is None else compose(make_model())
    stages = _check_exact(modules_of(composed))
    control = None  # exchanges between the stages of a pipeline
    if all(find_engine(stage) is not None for stage in stages):
        parts = Parts(stages)
        control = parts.all_ranks if parts.has_stages or len(stages) > 1 else None
    _copy_weights(plain, stages, control)
    rank, num_ranks, degrees = _places(mesh, micro_batches)
    _compare_batches(batch)
    local = _rows(batch, rank, num_ranks) if local_batch is None else local_batch(batch)
    loss = loss or _default_loss
    if run is None:
        _run(stages, local, micro_batches, loss)
    else:
        run(composed, local)
    for tie in ties_of(owner_of(param) for stage in stages for param in stage.parameters()):
        tie.sum_grads()
    loss(plain, batch).backward()
    tolerance = max(map(_tolerance, stages))
    checks = [check for stage in stages for check in _compare(plain, stage, tolerance)]
    if control is not None:
        order = [_plain_name(name) for name, _ in plain.named_parameters(remove_duplicate=False)]
        rows = _of_all_stages(control, [asdict(check) for check in checks], order)
        checks = [GradientCheck(**row) for row in rows]
    report = GradientReport(tuple(checks), tolerance, degrees)
    (num_wrong,) = all_reduce_scalars([float(bool(report.wrong))])
    if report.wrong:
        raise GradientError(str(report))
    if num_wrong:
        raise GradientError("another rank has wrong gradients; see that rank's error")
    return report


def _run(
    stages: Sequence[nn.Module],
    local: Any,
    micro_batches: int,
    loss: Callable[[nn.Module, Any], torch.Tensor],
) -> None:
    """Run the micro-batches of a model without a pipeline."""
    if len(stages) > 1:
        raise ConfigError("run: compose= returned several stages; say how a schedule runs them")
    composed = stages[0]
    engine = find_engine(composed)
    parts = _micro_batches(local, micro_batches)
    for part in parts:
        window = nullcontext() if engine is None else accumulate(composed, last=part is parts[-1])
        with window:
            (loss(composed, part) / micro_batches).backward()


def _places(mesh: Axes | DeviceMesh | None, micro_batches: int) -> tuple[int, int, dict[str, int]]:
    """Return this rank's place in the batch, the number of places, and the degrees by name."""
    if mesh is None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return rank, num_ranks, {"data-parallel ranks": num_ranks, "micro-batches": micro_batches}
    axes = resolve_axes(mesh, "")
    copies = axes.replicate
    rank = axes.shard.rank + (axes.shard.size * copies.rank if copies else 0)
    if isinstance(mesh, Axes):
        of_experts = ("ep", "efsdp") if mesh.ep > 1 else ()
        degrees = {name: mesh[name].size() for name in (*_DEGREES, *of_experts)}
    else:
        names = mesh.mesh_dim_names or [f"axis {n}" for n in range(mesh.ndim)]
        degrees = dict(zip(names, mesh.shape, strict=True))
    degrees["data-parallel ranks"] = axes.num_ranks
    degrees["micro-batches"] = micro_batches
    degrees["all ranks"] = dist.get_world_size()
    return rank, axes.num_ranks, degrees


def _compare_batches(batch: Any) -> None:
    """Raise ConfigError on all ranks if they were given different batches."""
    digest = hashlib.blake2b(digest_size=8)
    for value in tree_leaves(batch):
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            local = value.detach().cpu().contiguous()
            digest.update(f"{local.dtype} {tuple(local.shape)}".encode())
            digest.update(local.view(-1).view(torch.uint8).numpy().tobytes())
    number = int.from_bytes(digest.digest(), "big") % 2**20  # so that the sums are exact
    total, squares = map(int, all_reduce_scalars([float(number), float(number**2)]))
    if dist.get_world_size() * squares != total**2:  # equal for equal numbers only
        raise ConfigError(
            "batch: the ranks have different batches; give every rank the whole batch, the same on "
            "all. Each takes its own rows of it, or what local_batch= returns"
        )


_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def _rows(batch: Any, rank: int, num: int) -> Any:
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and (not tensor.dim() or tensor.shape[0] % num):
            raise ConfigError(
                f"batch: a tensor of shape {tuple(tensor.shape)} has no rows that {num} ranks or "
                "micro-batches can share evenly; choose another batch, or say local_batch="
            )
    return tree_map_only(torch.Tensor, lambda t: t.chunk(num)[rank], batch)


def _micro_batches(local: Any, num: int) -> list[Any]:
    """Cut this rank's part. **Raises** ConfigError on all ranks if one cannot."""
    parts, refusal = [], None
    try:
        parts = [_rows(local, number, num) for number in range(num)]
    except ConfigError as error:
        refusal = error
    (num_refused,) = all_reduce_scalars([float(refusal is not None)])
    if refusal is not None:
        raise refusal
    if num_refused:
        raise ConfigError("local_batch: another rank cannot cut its part into micro-batches")
    return parts


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    result = getattr(out, "loss", None)
    if result is None:
        result = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    if not isinstance(result, torch.Tensor):
        raise ConfigError(f"loss: {type(model).__name__} returns {type(out).__name__}; say loss=")
    return result if result.dim() == 0 else result.square().mean()


def _plain_name(name: str) -> str:
    """Remove wrappers' names, for both models: a plain model may have such a module too."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


@torch.no_grad()
def _copy_weights(plain: nn.Module, stages: Sequence[nn.Module], control: Control | None) -> None:
    """Copy weights and buffers of the composed model to the plain one; all ranks take part."""
    params = (param for stage in stages for param in stage.parameters())
    device = next((p.device for p in params), torch.device("cpu"))
    if any(p.is_meta for p in plain.parameters()):
        _to_empty(plain, device)
    plain.to(device)
    places = dict(_named_tensors(plain))
    weights = {n: _full(tensor) for stage in stages for n, tensor in _named_tensors(stage)}
    if control is not None:
        _share_weights(control, weights, places)
        return
    for name, value in weights.items():
        _check_shape(name, value.shape, places.get(name))
        places[name].copy_(value)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.named_parameters(remove_duplicate=False):
        yield _plain_name(name), tensor
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield _plain_name(name), buffer


def _to_empty(plain: nn.Module, device: torch.device) -> None:
    """Allocate a meta model's memory; tie tied weights again, which torch does not."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in plain.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    plain.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(path), attribute, plain.get_parameter(first))


def _compare(plain: nn.Module, composed: nn.Module, tolerance: float) -> Iterator[GradientCheck]:
    plain_params = {
        _plain_name(name): param for name, param in plain.named_parameters(remove_duplicate=False)
    }
    plain_grads = [param.grad for param in plain_params.values() if param.grad is not None]
    largest = max((float(_rms(grad.double())) for grad in plain_grads if grad.numel()), default=0.0)
    for wrapped, param in composed.named_parameters():
        name = _plain_name(wrapped)
        expected, grad = plain_params[name].grad, param.grad
        if grad is None or expected is None:
            # All ranks of a parameter agree on the presence of its gradient.
            if (grad is None) != (expected is None):
                zero = expected is None and grad is not None and not _full(grad).count_nonzero()
                if not zero:
                    missing = "composed" if grad is None else "one process"
                    yield GradientCheck(name, missing=missing)
            continue
        g, q = _full(grad).double().flatten(), expected.detach().double().flatten()
        difference = float(_rms(g - q)) if g.numel() else 0.0
        if difference <= 4 * tolerance**2 * largest:
            yield GradientCheck(name, rest=difference / (largest or 1.0), is_rounding=True)
            continue
        length = q.norm()
        if not length:
            yield GradientCheck(name, rest=float(g.norm() > 0))
            continue
        scale = g.dot(q) / length.square()
        rest = (g - scale * q).norm() / g.norm().clamp_min(torch.finfo(g.dtype).tiny)
        yield GradientCheck(name, float(scale), float("inf") if rest.isnan() else float(rest))


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def _tolerance(composed: nn.Module) -> float:
    """Return the tolerance of Note [How gradients are compared]."""
    dtypes = {p.dtype for p in composed.parameters() if p.is_floating_point() or p.is_complex()}
    engine = find_engine(composed)
    for unit in () if engine is None else engine.units:
        dtypes |= {d for d in (unit.precision.param, unit.precision.reduce_dtype) if d is not None}
    return sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))


Stages = TypeVar("Stages", bound=Sequence[torch.nn.Module])


def _check_exact(stages: Stages) -> Stages:
    """Return the stages. **Raises** ConfigError for encoded weights or gradients."""
    engines = (find_engine(stage) for stage in stages)
    precisions = [u.precision for engine in engines if engine is not None for u in engine.units]
    if any(precision.reduce_coding for precision in precisions):
        raise ConfigError(
            "compose: its reductions are encoded (Precision(reduce=)), so its gradients are "
            "rounded more than one process's; choose a dtype as reduce= for the check"
        )
    if any(precision.gather for precision in precisions):
        raise ConfigError(
            "compose: its gathers are encoded (Precision(gather=)), so its gradients are those of "
            "other weights than one process has; leave gather= out for the check"
        )
    return stages


@torch.no_grad()
def _share_weights(
    control: Control, local: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> None:
    """Copy the stages' full tensors to a plain model, by name.

    **Cost** every rank receives all stages, so use small models.

    **Raises** ConfigError, on all ranks, for names and shapes that differ from the plain model's,
    and for parameters that no stage has.
    """
    shapes = {name: list(tensor.shape) for name, tensor in local.items()}
    rows = exchange_any(control, json.dumps(shapes).encode())
    first_rank: dict[str, int] = {}
    for rank, row in enumerate(rows):
        for name, shape in json.loads(row).items():
            first_rank.setdefault(name, rank)
            _check_shape(name, shape, plain.get(name))
    held = {id(plain[name]) for name in first_rank}
    for name, place in plain.items():
        if id(place) not in held and isinstance(place, torch.nn.Parameter):
            raise ConfigError(
                f"compose: no stage has '{name}' of the plain model; a stage has its layers under "
                "the names of the whole model"
            )
    for name in sorted(first_rank):
        place, source = plain[name], first_rank[name]
        if source == control.rank:
            place.copy_(local[name])
        data = place.detach().cpu().contiguous().reshape(-1)
        received = control.broadcast(data.view(torch.uint8).numpy().tobytes(), source)
        if received and source != control.rank:
            place.copy_(torch.frombuffer(bytearray(received), dtype=place.dtype).view(place.shape))


def _check_shape(name: str, shape: Sequence[int], place: torch.Tensor | None) -> None:
    """Check that the plain model has a composed model's tensor. **Raises** ConfigError."""
    if place is None or tuple(place.shape) != tuple(shape):
        got = "has no such tensor" if place is None else f"has {tuple(place.shape)}"
        raise ConfigError(
            f"make_model: '{name}' {tuple(shape)} of the composed model; the plain one "
            f"{got}. compose= must keep names and shapes"
        )


def _of_all_stages(
    control: Control, checks: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Return all ranks' checks, each parameter once, in the plain model's order."""
    by_name: dict[str, dict[str, Any]] = {}
    for row in exchange_any(control, json.dumps(list(checks)).encode()):
        for check in json.loads(row):
            by_name.setdefault(check["name"], check)
    places = {name: place for place, name in enumerate(order)}
    return sorted(by_name.values(), key=lambda check: places[check["name"]])
