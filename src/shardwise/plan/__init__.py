"""The planner: memory and time of a run before it begins. Its import loads no torch.

Names are imported on first use; tracing a module loads torch, nothing else does.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.homes import Offload as Offload
    from shardwise.plan.accounting import account as account
    from shardwise.plan.candidate import Candidate as Candidate
    from shardwise.plan.machine.hardware import make_cluster as make_cluster
    from shardwise.plan.model.models import TracedModel as TracedModel
    from shardwise.plan.model.presets import find_model as find_model
    from shardwise.plan.planning import plan as plan
    from shardwise.plan.searching import Limits as Limits
    from shardwise.plan.searching import Space as Space
    from shardwise.plan.searching import search as search
    from shardwise.plan.step.play import play as play
    from shardwise.plan.timing.simulate import simulate as simulate

_HOMES = {
    "Candidate": "shardwise.plan.candidate",
    "Limits": "shardwise.plan.searching",
    "Offload": "shardwise.homes",
    "Space": "shardwise.plan.searching",
    "TracedModel": "shardwise.plan.model.models",
    "account": "shardwise.plan.accounting",
    "find_model": "shardwise.plan.model.presets",
    "make_cluster": "shardwise.plan.machine.hardware",
    "plan": "shardwise.plan.planning",
    "play": "shardwise.plan.step.play",
    "search": "shardwise.plan.searching",
    "simulate": "shardwise.plan.timing.simulate",
}

__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
