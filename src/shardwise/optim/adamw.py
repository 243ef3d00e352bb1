"""AdamW with moments in fp32, bf16 or 8 bits, for sharded and plain parameters.

Note [What others see of the state]
`state` has the moments in the form that the step uses: values as ``exp_avg`` and ``exp_avg_sq``,
sharded like the parameter, or this rank's codes as ``exp_avg_codes``, ``exp_avg_scales`` and so on.
Exports of the state (`state_dict`, a checkpoint, `shard(optimizer=)`) have ``step``, ``exp_avg``
and ``exp_avg_sq`` of torch's AdamW, decoded. Loaded state is converted to its group's form before
the next step. So state of ``torch.optim.AdamW`` can be loaded, and a group's ``moments`` may change
between two steps.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict, cast

import torch
from torch.optim.optimizer import ParamsT, StateDict

from shardwise.errors import ConfigError
from shardwise.layout.placements import local_of
from shardwise.optim.codes import Scratch
from shardwise.optim.kinds import ARGUMENTS, BLOCK
from shardwise.optim.moments import MOMENTS, AsTheyAre, Held, InBlocks, Moments, kind_of
from shardwise.optim.slices import Place, Slice, like, place_of, slice_of
from shardwise.optim.step import PartOfStep, Settings, Work, spans
from shardwise.tensor.replaced import params_of

_REFUSED = ("amsgrad", "maximize")
_OF_TORCH = (*_REFUSED, "foreach", "capturable", "differentiable", "fused")
_IGNORED = (*_OF_TORCH, "decoupled_weight_decay")
_ENDINGS = (*AsTheyAre.endings, *InBlocks.endings)


class AdamW(torch.optim.Optimizer):
    """AdamW with moments in fp32, bf16 or 8 bits.

    ``moments="fp32"`` is torch's; float32 parameters are bit-identical to those of
    ``torch.optim.AdamW(fused=True)``. ``"bf16"`` rounds stochastically, the same in every run.
    ``"8bit"`` has a float32 scale per ``block`` elements; a resume on another number of ranks
    quantises again. Groups may differ in both. Arithmetic is in float32, or in float64 for float64.

    **State** bytes per element of a rank: 8, 4, or 2 + 8 / block; and 4 per parameter.

    **Raises** ConfigError for settings out of range.

    **Source** Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        moments: str = "fp32",
        block: int = BLOCK,
    ) -> None:
        defaults: _Group = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "block": block,
        }
        _check(defaults)
        super().__init__(params, {**defaults})

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group with its settings. **Raises** ConfigError for settings out of range."""
        super().add_param_group(param_group)
        try:
            _check(cast(_Group, self.param_groups[-1]))
        except ConfigError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], object] | None = None
    ) -> object:
        """Update every parameter that has a gradient; return the result of ``closure``.

        **Cost** no communication. **Raises** ConfigError for sparse gradients and for parameters
        other than plain real numbers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.part_of_step(params_of(self))()
        return loss

    def part_of_step(self, params: Iterable[torch.Tensor]) -> PartOfStep:
        """Return the step of some parameters, with their present gradients and settings.

        Call the result once, on any thread. **Raises** ConfigError as `step` does.
        """
        wanted, todo = set(params), []
        for group in self.param_groups:
            kind = kind_of(group["moments"], group["block"])
            grads = ((param, param.grad) for param in group["params"] if param in wanted)
            slices = [(param, slice_of(param, grad)) for param, grad in grads if grad is not None]
            work = [self._ready(param, kind, mine) for param, mine in slices]
            todo.append((work, kind, _settings(cast(_Group, group))))

        return PartOfStep(todo)  # all checks come before the first change

    def bytes_to_come(self, param: torch.Tensor) -> list[int]:
        """Return the bytes of each tensor that a parameter's first step creates."""
        group = next(g for g in self.param_groups if any(param is p for p in g["params"]))
        kind, local = kind_of(group["moments"], group["block"]), local_of(param)
        made = kind.empty(place_of(param), torch.empty_like(local, device="meta"))
        return [tensor.nbytes for tensor in made.values()] * len(MOMENTS)

    def saved_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's state in the form of torch's AdamW, with codes decoded.

        **Cost** 8 bytes for each of this rank's elements, if moments are codes.
        """
        state: dict[str, torch.Tensor] = self.state.get(param, {})
        of_moments = {name + end for name in MOMENTS for end in _ENDINGS}
        others = {key: value for key, value in state.items() if key not in of_moments}
        return others | {name: _values(param, state, name) for name in _names(state)}

    def loaded_settings(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Return the settings that a group takes from a saved group: not the form of its moments.

        **Raises** ConfigError for settings that change the step (``amsgrad``, ``maximize``).
        """
        for name in _REFUSED:
            if settings.get(name):
                raise ConfigError(
                    f"optimizer: the state is of an AdamW with {name}=True, which "
                    "shardwise.optim.AdamW does not have; go on with torch.optim.AdamW"
                )
        return {k: v for k, v in settings.items() if k not in (*ARGUMENTS, *_IGNORED)}

    def state_dict(self) -> StateDict:
        """Return the state with decoded moments, as torch's AdamW can load it."""
        found = super().state_dict()
        params = params_of(self)
        found["state"] = {
            number: self.saved_state(params[number]) if isinstance(number, int) else state
            for number, state in found["state"].items()
        }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class or of torch's AdamW.

        The form of moments stays that of this optimizer's groups. **Raises** ConfigError as
        `loaded_settings` does.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # otherwise torch raises below
            groups = [
                {**self.loaded_settings(theirs), **{name: ours[name] for name in ARGUMENTS}}
                for theirs, ours in zip(groups, self.param_groups, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": groups})
        params = params_of(self)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for param, number in zip(params, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):  # torch casts some, and aliases others
                    self.state[param][name] = value.detach().to(param.device, copy=True)

    def _ready(self, param: torch.Tensor, kind: Moments, mine: Slice) -> Work:
        """Return a parameter's work; create its state or convert it to the group's form."""
        state, at = self.state[param], mine.param.device
        step = state.get("step", 0.0)
        if not isinstance(step, torch.Tensor) or step.device != at or step.dtype != torch.float32:
            state["step"] = torch.as_tensor(float(step), dtype=torch.float32, device=at)
        found = []
        for which, name in enumerate(MOMENTS):
            held = _flat(state, name, kind)
            if not kind.fits(held, mine.place, mine.param):
                moment = Moment(param, kind, which, {})
                if name in _names(state):
                    moment.fill(local_of(_values(param, state, name)))
                for end in _ENDINGS:
                    state.pop(name + end, None)
                state.update(moment.state)
                held = _flat(state, name, kind)
            found.append(held)
        return Work(mine, (found[0], found[1]), state["step"], param=param)


class Moment:
    """One moment of a parameter in its group's form, filled with values by `fill`.

    ``state`` has its tensors by key: those that are given if they have this form already. ``data``
    is the memory of the values or of their codes.
    """

    def __init__(
        self, param: torch.Tensor, kind: Moments, which: int, state: Mapping[str, object]
    ) -> None:
        local, name = local_of(param).detach(), MOMENTS[which]
        before = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        self._kind, self._which, self._place, self._local = kind, which, place_of(param), local
        self._held: Held = _flat(before, name, kind)
        if kind.fits(self._held, self._place, local):
            self.state = {name + end: before[name + end] for end in kind.endings}
        else:
            self._held = kind.empty(self._place, local)
            self.state = {
                name + end: like(param, flat.view(local.shape)) if kind.is_values else flat
                for end, flat in self._held.items()
            }
        self.data = self._held[kind.endings[0]]

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        """Store the values of this rank's elements, rounded to the nearest if needed."""
        flat = values.detach().to(self._local.device).reshape(-1)
        if self._kind.is_values:
            self.data.copy_(flat)
            return
        scratch = Scratch()
        for span in spans(self._place, self._local, 0):
            part = flat[span.lo : span.hi].float()
            self._kind.write(part, self._held, span, self._which, scratch)


def _values(param: torch.Tensor, state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a moment's values, from any form."""
    if name in state:
        return state[name]
    held = {end: local_of(state[name + end]).detach() for end in InBlocks.endings}
    local, place = local_of(param), place_of(param)
    kind = _kind_of_codes(held, place)
    values = torch.empty(local.numel(), dtype=torch.float32, device=local.device)
    scratch = Scratch()
    for span in spans(place, values, 0):
        values[span.lo : span.hi] = kind.read(held, span, MOMENTS.index(name), scratch)
    return like(param, values.view(local.shape))


def _kind_of_codes(held: Held, place: Place) -> InBlocks:
    """Return the block kind whose number of scales is that of the codes."""
    kinds = (InBlocks(1 << bits) for bits in range(4, 16))
    numel = held["_codes"].numel()
    return next(k for k in kinds if k.num_blocks(place, numel) == held["_scales"].numel())


def _names(state: Mapping[str, object]) -> list[str]:
    """Return the names of the moments that a state has, in any form."""
    return [name for name in MOMENTS if any(name + end in state for end in _ENDINGS)]


def _flat(state: Mapping[str, torch.Tensor], name: str, kind: Moments) -> Held:
    """Return a moment's flat memory, for the tensors that have the form of ``kind``."""
    found = {}
    for end in kind.endings:
        if (value := state.get(name + end)) is not None:
            local = local_of(value)
            if local.is_contiguous():
                found[end] = local.view(-1)  # no detach(): state has no graph
    return found


class _Group(TypedDict):
    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    moments: str
    block: int


def _settings(group: _Group) -> Settings:
    beta1, beta2 = group["betas"]
    numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    return Settings(*map(float, numbers))


def _check(group: _Group) -> None:
    """Refuse settings out of range. **Raises** ConfigError."""
    kind_of(group["moments"], group["block"])
    positive = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    for name, value in positive.items():
        if not float(value) >= 0:
            raise ConfigError(f"{name}={value!r}: expected a number of 0 or more")
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ConfigError(f"betas={betas}: expected two numbers from 0 to 1, without 1 itself")
