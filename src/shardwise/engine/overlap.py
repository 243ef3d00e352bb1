"""``overlap()``: an optimizer's step goes on behind what follows it, unit by unit.

Note [Optimizers of offloaded units]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where slices live on the host nobody has to call ``overlap()``. From the first model with such units
on, a hook of torch's sees every optimizer's steps. One that has parameters of such units is given
an overlap before its first step, which takes this step already: the optimizer's own code gets a
copy without parameters, and a hook after it, ahead of the user's, takes the step. The hooks stay:
one removed when a model is freed would be removed under the loop that calls it, if garbage is
collected there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

from shardwise.engine.apart import optimizer_like
from shardwise.engine.steps import Overlap, homes_of
from shardwise.errors import ConfigError
from shardwise.unit.unit import Unit

ELEMENTWISE = (
    *("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"),
    "ASGD",
)
_LOG = logging.getLogger("shardwise")
_OVERLAP = "_shardwise_overlap"
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - a type


def overlap(optimizer: O, *, threads: int | None = None, in_backward: bool = False) -> O:
    """Let an optimizer's step go on in the background; return the optimizer.

    Its ``step()`` returns at once, and takes the same steps to the bit. The next forward pass waits
    for each unit before it uses it; reading a parameter, a gradient or state that is cut like its
    parameter, clipping, saving and evaluating wait for what they need. ``threads`` are those of the
    step; None is as many as the caller has. See Note [A step behind the next forward pass] in
    `steps`.

    Steps are plain, and block, where they make a parameter's state (the first with it), on an
    accelerator (where they do not block anyway), inside accumulation windows, and while `unshard()`
    holds parameters in full. A closure is called at once.

    **State** what ``p.to_local()`` gave before a step is written during it: take it again after.
    Plain tensors of the state (counts of steps, codes of 8-bit moments) are as far as the thread
    has come; ``optimizer.state_dict()`` waits.

    **Raises** ConfigError for an optimizer that is not known to work element by element. What
    fails in the background raises ShardError in the next call that waits, with unit and rank.
    ConfigError for ``in_backward``, which is gone.
    """
    if in_backward:
        raise ConfigError(
            "overlap(in_backward=True): steps in the backward pass are gone, as they were no "
            "faster; use overlap(optimizer), whose steps run behind the next forward pass and "
            "leave the same bits"
        )
    if not is_elementwise(optimizer):
        raise ConfigError(
            f"overlap(): {type(optimizer).__name__} is not known to work element by element, so "
            "its units cannot be stepped apart. Of torch.optim these are: "
            f"{', '.join(ELEMENTWISE)}; and shardwise.optim.AdamW"
        )
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: expected 1 or more, or None")
    if _OVERLAP not in vars(optimizer):
        vars(optimizer)[_OVERLAP] = Overlap(optimizer, threads)
    return optimizer


def overlap_offloaded(units: Iterable[Unit]) -> None:
    """Let optimizers of units whose slices live on the host be overlapped.

    See Note [Optimizers of offloaded units].
    """
    if any(unit.home is not None for unit in units):
        _watch_first_steps()


@cache
def _watch_first_steps() -> None:
    torch_optimizer.register_optimizer_step_pre_hook(_attach)


def _attach(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Overlap an optimizer that should be; return what its own step does nothing with."""
    if torch.compiler.is_compiling():  # the step itself says what to do
        return None
    made: Overlap | None = vars(optimizer).get(_OVERLAP)
    if made is not None:
        made.is_begun = False  # a hook of the user's may have raised before the first step
        return None
    homes = homes_of(optimizer)
    if not homes or hasattr(optimizer, "optimizers"):  # of which each is asked by itself
        return None
    if not is_elementwise(optimizer):
        _tell_of_memory(optimizer, any(home.files.optimizer is not None for home in homes))
        return None
    overlap(optimizer)
    hooks = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(optimizer.register_step_post_hook(_step_first).id, last=False)
    vars(optimizer)[_OVERLAP].is_begun = True
    return (optimizer_like(optimizer, [], defaultdict(dict)), *args[1:]), kwargs


def _tell_of_memory(optimizer: Any, has_files: bool) -> None:
    """Warn, at the first step, that the state will not lie in files."""
    if has_files and not optimizer.state:
        _LOG.warning(
            "%s is not known to work element by element, so its step goes on as ever, and its "
            "state is in host memory and not in files",
            type(optimizer).__name__,
        )


def _step_first(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take the step that `_attach` has taken away."""
    made: Overlap | None = vars(optimizer).get(_OVERLAP)
    if made is not None and made.is_begun:
        made.is_begun = False
        made.step_now(optimizer)


def staging_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return what buffers take on the device that state on the host passes in its step."""
    parts = () if optimizer is None else getattr(optimizer, "optimizers", (optimizer,))
    made: list[Overlap] = [vars(o)[_OVERLAP] for o in parts if _OVERLAP in vars(o)]
    return sum(each.streaming.num_bytes for each in made)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the optimizer's units may be stepped apart."""
    kinds = {getattr(torch.optim, name) for name in ELEMENTWISE}
    return type(optimizer) in kinds or hasattr(optimizer, "part_of_step")
