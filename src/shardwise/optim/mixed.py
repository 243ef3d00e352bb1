"""Several optimizers as one: Muon for the matrices, AdamW for the rest.

Schedules, loss scalers, clipping and checkpoints take one optimizer. So `Mixed` has the same group
dicts as its optimizers, and one dict of state that they share.
"""

from collections.abc import Callable
from itertools import islice

import torch
from torch import nn

from shardwise.errors import ConfigError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Takes = Callable[[str, nn.Parameter], bool]


class Mixed(torch.optim.Optimizer):
    """Several optimizers with disjoint parameters, as one optimizer.

    Its groups are those of the optimizers, in order; both see a change of a group.
    Muon enlarges the error of encoded reductions (``Precision(reduce="int8-a2a")``): parameters
    deviate more from exact reduction than under AdamW. Give ``reduce`` a dtype for Muon.

    **State** one dict that the optimizers share: save and load only this optimizer.

    **Raises** ConfigError without optimizers, for `optim.AdamW`, whose saved and kept moments
    differ, and for a parameter in two of them.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise ConfigError("Mixed: expected optimizers of torch, got none")
        if any(hasattr(each, "saved_state") for each in optimizers):
            raise ConfigError(
                "Mixed: shardwise.optim.AdamW cannot be one of several; use torch.optim.AdamW"
            )
        groups = [group for each in optimizers for group in each.param_groups]
        held = [param for group in groups for param in group["params"]]
        if len({id(param) for param in held}) < len(held):
            raise ConfigError("Mixed: two of its optimizers have the same parameter")
        super().__init__(groups, {})
        self.optimizers = list(optimizers)
        for each in optimizers:
            self.state.update(each.state)
        self._share()

    @classmethod
    def of(
        cls, model: nn.Module, matrices: Make, rest: Make, takes: Takes | None = None
    ) -> "Mixed":
        """Make two optimizers of a model's trained parameters: of the matrices and of the rest.

        ``takes(name, parameter)`` returns True for matrices. By default these are parameters of two
        dims, except embeddings and tensors with the shape of the largest embedding, such as a head.

        **Raises** ConfigError if one of the two would have no parameters.
        """
        params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        takes = takes or _hidden_matrices(model)
        chosen = {name for name, param in params if takes(name, param)}
        both = [[p for n, p in params if (n in chosen) is taken] for taken in (True, False)]
        if not all(both):
            which = "matrices" if not both[0] else "others"
            raise ConfigError(f"Mixed.of: the model has no parameters that are {which}")
        return cls(matrices(both[0]), rest(both[1]))

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Refuse a new group. **Raises** ConfigError."""
        if "optimizers" in vars(self):
            raise ConfigError(
                "Mixed: a group belongs to one of its optimizers; add it there first, and make "
                "Mixed anew"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], object] | None = None
    ) -> object:
        """Step every optimizer in turn; call ``closure`` once and return its result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def state_dict(self) -> dict[str, object]:
        """Wait for steps in the background; return groups and state in torch's form."""
        self._finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load groups and state from `state_dict`."""
        self._finish()
        super().load_state_dict(state_dict)

    def _finish(self) -> None:
        """Wait for the optimizers' overlapped steps, by their state-dict hooks."""
        for each in self.optimizers:
            for hook in each._optimizer_state_dict_pre_hooks.values():
                hook(each)

    def _share(self) -> None:
        """Give the optimizers this optimizer's groups and state."""
        groups = iter(self.param_groups)
        for each in self.optimizers:
            own = list(islice(groups, len(each.param_groups)))
            each.__setstate__({"param_groups": own, "state": self.state})

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled state, with the optimizers."""
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Set groups and state, in a load or a copy."""
        super().__setstate__(state)
        self._share()


def _hidden_matrices(model: nn.Module) -> Takes:
    embeddings = [m.weight for m in model.modules() if isinstance(m, _EMBEDDINGS)]
    largest = max((tuple(weight.shape) for weight in embeddings), default=())
    held = {id(weight) for weight in embeddings}

    def takes(name: str, param: nn.Parameter) -> bool:
        is_matrix = param.ndim == 2 and param.numel() > 0 and id(param) not in held
        return is_matrix and tuple(param.shape) != largest

    return takes


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
