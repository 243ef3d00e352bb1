"""Lab 6: one parameter's path through the engine. You follow `2.up.weight` through a step.

This file uses Shardwise, and watches it. Fill in PREDICT first, then the gaps.
`shardwise lab run 6` and `shardwise lab check 6 lab06_path.py`.
"""

import sys
from collections.abc import Callable
from types import FrameType

from torch import Tensor, nn

import shardwise
from shardwise.unit.unit import Unit

# Step 1, before you run anything. Six units on two ranks at stage 3, cut by rows.
PREDICT = {
    # Our parameter has shape [128, 64].
    "rows of 2.up.weight on rank 0": 64,  # predicted
    # The head's weight has shape [7, 64].
    "rows of the head on rank 1": 3,  # predicted
    # The engine keeps the last unit full from forward to backward.
    "gathers of six units in a step": 11,  # predicted
}

# Functions of the engine that a unit passes. Their sources stand on the page.
STATIONS = (
    "Backward.on_backward",
    "Backward.on_unit_end",
    "Engine.after_forward",
    "Engine.before_forward",
    "Reductions.add",
    "Storage.free",
    "Storage.prepare_gather",
    "Unit.finish_unshard",
)


def shard(model: nn.Module, modules: list[nn.Module]) -> None:
    """Shard a model at stage 3, with one unit for each of the modules."""
    units = modules
    shardwise.shard(model, units=units, stage=3)


def rows_of(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first row that a rank owns, and the row after its last one."""
    # GAP 1. Each rank has ceil(rows / ranks) of them, until there are no more: as torch.chunk.
    share = -(-num_rows // num_ranks)
    return min(rank * share, num_rows), min((rank + 1) * share, num_rows)
    # END


def record(unit: Unit, step: Callable[[], None]) -> list[str]:
    """Run a step; return the STATIONS that were called with this unit or its storages, in order."""
    own = {id(unit), *map(id, unit.storages)}
    found: list[str] = []
    # GAP 2. `sys.setprofile(f)` has Python call f(frame, event, argument) whenever a function is
    # entered (event "call") or left; `sys.setprofile(None)` ends it. At entry `frame.f_locals` are
    # the arguments by name, and `frame.f_code.co_qualname` is a name as in STATIONS.

    def look(frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_qualname
        is_ours = any(id(value) in own for value in frame.f_locals.values())
        if event == "call" and name in STATIONS and is_ours:
            found.append(name)

    sys.setprofile(look)
    step()
    sys.setprofile(None)
    return found
    # END


def path() -> list[str]:
    """Return the eleven stations of a middle unit in a step, in order; some come twice."""
    # GAP 3. The gather begins while an earlier unit computes. Read the sources on the page, then
    # compare with what `record` finds.
    forward = ["Storage.prepare_gather", "Engine.before_forward", "Unit.finish_unshard"]
    forward += ["Engine.after_forward", "Storage.free"]
    backward = ["Storage.prepare_gather", "Backward.on_backward", "Unit.finish_unshard"]
    backward += ["Backward.on_unit_end", "Reductions.add", "Storage.free"]
    return forward + backward
    # END


def held(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's class, and the shape of the elements that this rank has."""
    elements = tensor.to_local() if isinstance(tensor, shardwise.ShardTensor) else tensor
    return type(tensor).__name__, tuple(elements.shape)


def forms(module: nn.Module, step: Callable[[], None]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return `held(module.weight)` at "rest" and in "forward", and that of its "grad" after."""
    # GAP 4. In forward: a hook of the module (`register_forward_hook`) reads `module.weight` when
    # the module has run. Remove the hook after the step.
    found = {"rest": held(module.weight)}
    hook = module.register_forward_hook(lambda m, *_: found.update(forward=held(m.weight)))
    step()
    hook.remove()
    found["grad"] = held(module.weight.grad)
    return found
    # END


def sent(own: list[int], others: list[int], num_tensors: int) -> tuple[int, int]:
    """Return the bytes that this rank sends in gathers and in reductions of a step, on two ranks.

    For each unit, in order: bytes of this rank's slices, and bytes of the other rank's.
    """
    # GAP 5. A gather sends what this rank has, a reduction what the other one has. Each unit is
    # gathered twice, but for the last. A reduction also counts ranks with a gradient: 4 bytes for
    # each parameter tensor.
    return 2 * sum(own) - own[-1], sum(others) + 4 * num_tensors
    # END


# After the run. lab06_broken.py trains the same values, and is full of full parameters. Which line,
# and which finding names it: "SW001" not sharded, "SW002" one unit for the whole model, "SW003"
# units too small, "SW006" padding?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# A parameter that the optimizer has just changed is stale in every full copy. Which message tells
# the other ranks: "broadcast", "barrier" or "none"?
DECIDE = {
    "message": None,
}

# True or False?
CLAIMS = {
    "model.parameters() gives full parameters to the optimizer": None,
    "A unit is gathered when its forward begins": None,
    "Between forward and backward one unit stays full": None,
}
