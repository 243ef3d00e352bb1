"""Before the run: what fits, how fast it will be, and why. No torch at import.

Names are imported on first use; tracing a module loads torch, nothing else does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.plan.accounting import account
    from shardwise.plan.candidate import Candidate, Offload
    from shardwise.plan.machine.catalogue import make_cluster
    from shardwise.plan.model.models import find_model
    from shardwise.plan.model.traced import TracedModel
    from shardwise.plan.planning import plan
    from shardwise.plan.searching import Limits, Space, search
    from shardwise.plan.step.play import play
    from shardwise.plan.timing.scenario import Scenario
    from shardwise.plan.timing.simulate import simulate

_HOMES = {
    "Candidate": "shardwise.plan.candidate",
    "Limits": "shardwise.plan.searching",
    "Offload": "shardwise.plan.candidate",
    "Scenario": "shardwise.plan.timing.scenario",
    "Space": "shardwise.plan.searching",
    "TracedModel": "shardwise.plan.model.traced",
    "account": "shardwise.plan.accounting",
    "find_model": "shardwise.plan.model.models",
    "make_cluster": "shardwise.plan.machine.catalogue",
    "plan": "shardwise.plan.planning",
    "play": "shardwise.plan.step.play",
    "search": "shardwise.plan.searching",
    "simulate": "shardwise.plan.timing.simulate",
}

__all__ = [
    "Candidate",
    "Limits",
    "Offload",
    "Scenario",
    "Space",
    "TracedModel",
    "account",
    "find_model",
    "make_cluster",
    "plan",
    "play",
    "search",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.plan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
