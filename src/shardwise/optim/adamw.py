"""AdamW whose moments rest in fp32, in bf16 or in 8 bits, on sharded and on plain parameters.

Note [What others see of the state]
In `state` moments are as the step wants them: ``exp_avg`` and ``exp_avg_sq`` cut like the parameter
where they are values, and ``exp_avg_codes``, ``exp_avg_scales`` and so on, this rank's alone, where
they are codes. Whoever takes the state elsewhere (`state_dict`, a checkpoint, `shard(optimizer=)`)
gets ``step``, ``exp_avg`` and ``exp_avg_sq`` of torch's AdamW, decoded. What comes back is brought
into the form of its group before the next step, so state of ``torch.optim.AdamW`` may come, too,
and a group may be given other ``moments`` between two steps.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.layout.placements import local_of
from shardwise.optim.kinds import ARGUMENTS, BLOCK
from shardwise.optim.moments import MOMENTS, AsTheyAre, Held, InBlocks, Moments, kind_of
from shardwise.optim.scratch import Scratch
from shardwise.optim.slices import Place, Slice, like, place_of, slice_of
from shardwise.optim.step import PartOfStep, Settings, Work, spans

_REFUSED = ("amsgrad", "maximize")
_OF_TORCH = (*_REFUSED, "foreach", "capturable", "differentiable", "fused")
_IGNORED = (*_OF_TORCH, "decoupled_weight_decay")
_ENDINGS = (*AsTheyAre.endings, *InBlocks.endings)


class AdamW(torch.optim.Optimizer):
    """Take AdamW's steps with moments in fp32, bf16 or 8 bits.

    ``moments`` of ``"fp32"`` are torch's, with the bits of ``torch.optim.AdamW(fused=True)`` on
    float32 parameters. ``"bf16"`` rounds by chance, the same in every run. ``"8bit"`` has a float32
    scale for each ``block`` elements; resumed on another number of ranks they are quantised anew.
    Both may differ from group to group. Arithmetic is in float32 (float64 for such parameters).

    **State** bytes per element of a rank: 8, 4, or 2 + 8 / block; and 4 per parameter.

    **Raises** ConfigError for settings out of range.

    **Source** Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        moments: str = "fp32",
        block: int = BLOCK,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "block": block,
        }
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with settings of its own. **Raises** ConfigError for wrong ones."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` does.

        **Cost** nothing is sent. **Raises** ConfigError for sparse gradients and for parameters
        that are no plain real numbers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.part_of_step(p for group in self.param_groups for p in group["params"])()
        return loss

    def part_of_step(self, params: Iterable[torch.Tensor]) -> PartOfStep:
        """Return the step of some parameters, with gradients and settings as they are now.

        It is called once, on whatever thread. **Raises** ConfigError as `step` does.
        """
        wanted, todo = set(params), []
        for group in self.param_groups:
            kind = kind_of(group["moments"], group["block"])
            grads = ((param, param.grad) for param in group["params"] if param in wanted)
            slices = [(param, slice_of(param, grad)) for param, grad in grads if grad is not None]
            work = [self._ready(param, kind, mine) for param, mine in slices]
            todo.append((work, kind, _settings(group)))

        return PartOfStep(todo)  # nothing changes before all is known to be right

    def bytes_to_come(self, param: torch.Tensor) -> list[int]:
        """Return the bytes of each tensor that a first step makes for a parameter."""
        group = next(g for g in self.param_groups if any(param is p for p in g["params"]))
        kind, local = kind_of(group["moments"], group["block"]), local_of(param)
        made = kind.empty(place_of(param), torch.empty_like(local, device="meta"))
        return [tensor.nbytes for tensor in made.values()] * len(MOMENTS)

    def saved_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state as torch's AdamW has it: moments that are codes, decoded.

        **Cost** 8 bytes for each of this rank's elements, where they are codes.
        """
        state: dict[str, Any] = self.state.get(param, {})
        of_moments = {name + end for name in MOMENTS for end in _ENDINGS}
        others = {key: value for key, value in state.items() if key not in of_moments}
        return others | {name: _values(param, state, name) for name in _names(state)}

    def loaded_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a group takes of a saved one's settings: not how its moments are kept.

        **Raises** ConfigError where the steps were others (``amsgrad``, ``maximize``).
        """
        for name in _REFUSED:
            if settings.get(name):
                raise ConfigError(
                    f"optimizer: the state is of an AdamW with {name}=True, which "
                    "shardwise.optim.AdamW does not have; go on with torch.optim.AdamW"
                )
        return {k: v for k, v in settings.items() if k not in (*ARGUMENTS, *_IGNORED)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state with decoded moments, which torch's AdamW can load too."""
        found = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        found["state"] = {
            number: self.saved_state(params[number]) if isinstance(number, int) else state
            for number, state in found["state"].items()
        }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict`, or that of torch's AdamW, has returned.

        How moments are kept is decided here, not there. **Raises** ConfigError as
        `loaded_settings` does.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # torch says what is wrong otherwise
            groups = [
                {**self.loaded_settings(theirs), **{name: ours[name] for name in ARGUMENTS}}
                for theirs, ours in zip(groups, self.param_groups, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": groups})
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for param, number in zip(params, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):  # torch casts some of them, and shares others
                    self.state[param][name] = value.detach().to(param.device, copy=True)

    def _ready(self, param: torch.Tensor, kind: Moments, mine: Slice) -> Work:
        """Return what a step takes, with state made or brought into the form of the group."""
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
    """One moment of a parameter, in the form that its group asks for, to be filled with values.

    ``state`` are its tensors by their keys: those of ``before`` if they have that form. ``data`` is
    the memory of the values, or of their codes.
    """

    def __init__(
        self, param: torch.Tensor, kind: Moments, which: int, before: Mapping[str, Any]
    ) -> None:
        local, name = local_of(param).detach(), MOMENTS[which]
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
        """Take the values of this rank's elements: rounded to the nearest, where they must be."""
        flat = values.detach().to(self._local.device).reshape(-1)
        if self._kind.is_values:
            self.data.copy_(flat)
            return
        scratch = Scratch()
        for span in spans(self._place, self._local, 0):
            part = flat[span.lo : span.hi].float()
            self._kind.write(part, self._held, span, self._which, scratch)


def _values(param: torch.Tensor, state: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a moment's values, whatever form they have."""
    if name in state:
        found: torch.Tensor = state[name]
        return found
    held = {end: local_of(state[name + end]).detach() for end in InBlocks.endings}
    local, place = local_of(param), place_of(param)
    kind = _kind_of_codes(held, place)
    values = torch.empty(local.numel(), dtype=torch.float32, device=local.device)
    scratch = Scratch()
    for span in spans(place, values, 0):
        values[span.lo : span.hi] = kind.read(held, span, MOMENTS.index(name), scratch)
    return like(param, values.view(local.shape))


def _kind_of_codes(held: Held, place: Place) -> InBlocks:
    """Return the blocks of codes by how many scales they have; as many are the same blocks."""
    kinds = (InBlocks(1 << bits) for bits in range(4, 16))
    numel = held["_codes"].numel()
    return next(k for k in kinds if k.num_blocks(place, numel) == held["_scales"].numel())


def _names(state: Mapping[str, Any]) -> list[str]:
    """Return the moments that a state has, in whatever form."""
    return [name for name in MOMENTS if any(name + end in state for end in _ENDINGS)]


def _flat(state: Mapping[str, Any], name: str, kind: Moments) -> Held:
    """Return the memory of a moment, flat, as far as it has the form of a kind."""
    found = {}
    for end in kind.endings:
        if (value := state.get(name + end)) is not None:
            local = local_of(value)
            if local.is_contiguous():
                found[end] = local.view(-1)  # no detach(): state has no graph
    return found


def _settings(group: Mapping[str, Any]) -> Settings:
    beta1, beta2 = group["betas"]
    numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    return Settings(*map(float, numbers))


def _check(group: Mapping[str, Any]) -> None:
    """Refuse settings out of range. **Raises** ConfigError."""
    kind_of(group["moments"], group["block"])
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise ConfigError(f"{name}={group[name]!r}: expected a number of 0 or more")
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ConfigError(f"betas={betas}: expected two numbers from 0 to 1, without 1 itself")
