"""The end of a pipeline's step, which torch's schedules tell each stage.

Note [Schedules divide what they find]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After its backward passes a schedule divides every ``p.grad`` by its number of micro-batches. Over
several schedules before one step that is wrong: what the first has left is divided again by the
second (pytorch#196641). So inside of ``accumulate(..., last=False)`` gradients stay on the rank as
they are, at any stage, and the division of the last schedule is that of all of them.
"""

from dataclasses import replace

from shardwise.engine.runtime import Engine
from shardwise.errors import StateError
from shardwise.layout.placements import local_of
from shardwise.unit.param import ShardedParam
from shardwise.unit.states import GradState


def end_schedule(engine: Engine) -> None:
    """Reduce what the micro-batches of a schedule have left, or keep it inside of a window.

    **Raises** StateError where ``p.grad`` has gradients of an earlier schedule already.
    """
    params = [param for unit in engine.units for param in unit.params]
    if engine.conditions.is_last_micro_batch is not False and any(p.has_partial for p in params):
        engine.finish_reductions()
        before = next((p.name for p in params if _has_grad(p)), None)
        if before is not None:
            raise StateError(
                f"schedule.step(): '{before}' has a gradient of an earlier step of a schedule, "
                "which this one would divide by its number of micro-batches again. Call "
                "optimizer.zero_grad() before it, or accumulate over schedules: "
                "`with shardwise.accumulate(stages, last=False): schedule.step(...)` for all but "
                "the last before the optimizer's step"
            )
    end_passes(engine)


def end_passes(engine: Engine) -> None:
    """Reduce what backward passes have kept; inside of a window that is not over, keep it."""
    if engine.conditions.is_last_micro_batch is False:
        _keep(engine)
    else:
        _reduce(engine, last=True)


def _reduce(engine: Engine, *, last: bool) -> None:
    """Reduce the gradients that are there, wherever they came from; free what is full."""
    for unit in engine.units:
        if unit.grad_state is GradState.EMPTY and any(s.has_partial for s in unit.params):
            unit.enter_grad_state(GradState.PARTIAL)
        if not unit.settings.stays_full:
            unit.unpin()
    with engine.conditions.micro_batch(last=last):
        engine.on_pass([])  # those that another rank may have take part, as in any pass
        engine.on_pass_end()


def _has_grad(param: ShardedParam) -> bool:
    """Tell whether a mean is there that ``zero_grad(set_to_none=False)`` has not zeroed."""
    return param.grad is not None and bool(local_of(param.grad).count_nonzero())


def _keep(engine: Engine) -> None:
    """Keep the sums on this rank, and free what is full."""
    for unit in engine.units:
        unit.settings = replace(unit.settings, keeps_grads=True)
    _reduce(engine, last=False)
    for unit in engine.units:
        unit.settings = replace(unit.settings, keeps_grads=False)
        if unit.grad_state is GradState.PARTIAL:
            unit.keep_partials()
            for param in unit.params:
                param.leaves_scale = True
