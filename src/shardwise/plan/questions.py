"""What a user has not told that matters: each setting with what it could be, and what follows."""

from collections.abc import Callable, Set
from dataclasses import replace
from itertools import product

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.machine.pricing import Pricer
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planned import Answer, Possible, Question
from shardwise.plan.planning import Model, Plan, plan

_WORTH_ASKING = 0.01  # of memory, or of the step
# What a setting could be beside what is assumed, in the words of its flag.
_OTHERS: dict[str, tuple[str, ...]] = {
    "kernels": ("compiled",),
    "loss": ("held", "chunked", "compiled"),
    "optimizer_kernel": ("foreach",),
}


def asked_of(
    made: Plan,
    model: Model,
    cluster: Cluster,
    told: Set[str],
    prices_of: Callable[[Candidate], Pricer],
) -> Plan:
    """Return a plan with the questions whose answers would change it, and all that it may be then.

    ``told`` are the settings that the user has decided. Nothing is asked of a model that is traced:
    its file says how it runs.

    **Cost** a plan for every combination of answers: some dozen.
    """
    if not isinstance(model, ShapedModel):
        return made
    base = made.candidate
    others = {name: values for name, values in _OTHERS.items() if name not in told}
    if base.activation_checkpointing == "selective":  # some mean what is called per_op here
        others["activation_checkpointing"] = ("per_op",)
    if not others:
        return made
    choices = {name: (getattr(base, name), *values) for name, values in others.items()}

    def planned(candidate: Candidate) -> Plan:
        if candidate == base:
            return made
        return plan(model, cluster, candidate, prices=prices_of(candidate))

    every = [
        planned(replace(base, **dict(zip(choices, values, strict=True))))
        for values in product(*choices.values())
    ]
    questions = []
    for name, values in choices.items():
        answers = [planned(replace(base, **{name: value})) for value in values]
        if any(_differs(each, made) for each in answers):
            said = zip(answers, values, strict=True)
            rows = ((v, e.memory.low_bytes, e.memory.high_bytes, e.step_s) for e, v in said)
            questions.append(Question(name, tuple(Answer(*row) for row in rows)))
    if not questions:
        return made
    possible = Possible(
        min(each.memory.low_bytes for each in every),
        max(each.memory.high_bytes for each in every),
        min(each.step_s for each in every),
        max(each.step_s for each in every),
    )
    return replace(made, questions=tuple(questions), possible=possible)


def _differs(one: Plan, other: Plan) -> bool:
    """Tell whether two plans differ by more than what a plan is off by anyway."""
    pairs = (one.memory.high_bytes, other.memory.high_bytes), (one.step_s, other.step_s)
    return any(abs(a - b) > _WORTH_ASKING * b for a, b in pairs)
