"""Which keys of a DCP folder are the model's, which are the optimizer's, and of which parameter.

Note [Which key is which]
A folder of DCP is one table of keys such as ``model.layers.0.weight``; that this is a parameter,
and of which model, is known only to the program that wrote it. The optimizer says it: it names the
parameters that it updates. So an optimizer is looked for first, by its ``param_groups``; it may
stand at any depth (``optim.``, ``app.optimizer.``, or at the top), as nested dicts
(``param_groups.0.lr`` and a list of names) or flattened (``param_groups.<name>.lr``). The model is
then the one prefix under which each of those names is a tensor; of several, the one that ends in
``model``. Without an optimizer, the model is what stands under a key ``model``, or else the only
dict of tensors that there is. If that leaves more than one, nothing is guessed: it is refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.convert.dcp_metadata import DcpMetadata
from shardwise.errors import CheckpointError, DamagedCheckpoint

_GROUPS = re.compile(r"(^|.*?\.)param_groups\.")
_NUMBERED = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True)
class Group:
    """One param_group: the keys of its options, and its parameters by name."""

    options: Mapping[str, str]
    params: tuple[str, ...]


@dataclass(frozen=True)
class DcpNames:
    """The prefixes of the model and, if there is one, of the optimizer; the optimizer's groups.

    In a flattened optimizer each parameter is a group, whether or not its options are its own.
    """

    model: str
    optimizer: str | None
    groups: tuple[Group, ...] = ()
    flattened: bool = False

    @cached_property
    def members(self) -> frozenset[str]:
        """The parameters that the optimizer updates."""
        return frozenset(name for group in self.groups for name in group.params)

    def param_of(self, key: str) -> tuple[str, str] | None:
        """Return (parameter, key of its state) of an optimizer's state; None for other keys."""
        prefix = f"{self.optimizer}state."
        if self.optimizer is None or not key.startswith(prefix):
            return None
        name, entry = key.removeprefix(prefix), ""
        while name not in self.members:
            name, dot, last = name.rpartition(".")
            if not dot:
                return None
            entry = f"{last}.{entry}" if entry else last
        return (name, entry) if entry else None

    def is_option(self, key: str) -> bool:
        """Tell whether a key is of the optimizer's groups."""
        return self.optimizer is not None and key.startswith(f"{self.optimizer}param_groups.")


def find_names(metadata: DcpMetadata, where: str, value_of: Callable[[str], Any]) -> DcpNames:
    """Tell the model's keys from the optimizer's. See Note [Which key is which].

    ``value_of`` reads one value of the folder. **Raises** CheckpointError when there is no answer,
    or more than one.
    """
    found = [(m[1], key) for key in metadata.paths if (m := _GROUPS.match(key))]
    # Every group has these; a user's own `param_groups` does not.
    prefixes = {prefix for prefix, key in found if key.endswith((".params", ".lr"))}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{where}: several optimizers, at {_quoted(prefixes)}; one was expected. Save each "
            "with its model in a folder of its own"
        )
    if not prefixes:
        return DcpNames(_only_model(metadata, where), None)
    (prefix,) = prefixes
    of_groups = f"{prefix}param_groups."
    keys = [key.removeprefix(of_groups) for key in metadata.paths if key.startswith(of_groups)]
    flattened = "0.params" not in keys
    if flattened:
        groups = _flattened_groups(keys, of_groups)
    else:
        groups = _numbered_groups(keys, of_groups, where, value_of)
    members = [name for group in groups for name in group.params]
    model = _model_of(metadata, where, prefix, members)
    return DcpNames(model, prefix, groups, flattened)


def _numbered_groups(
    keys: Iterable[str], prefix: str, where: str, value_of: Callable[[str], Any]
) -> tuple[Group, ...]:
    options: dict[int, dict[str, str]] = {}
    for key in keys:
        if (match := _NUMBERED.fullmatch(key)) is None:
            raise DamagedCheckpoint(f"{where}: '{prefix}{key}' belongs to no group of parameters")
        options.setdefault(int(match[1]), {})[match[2]] = prefix + key
    groups = []
    for number in sorted(options):
        members = value_of(f"{prefix}{number}.params")
        if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
            raise CheckpointError(
                f"{where}: group {number} of the optimizer numbers its parameters, so which ones "
                "they are is not known. Save the optimizer's state by get_optimizer_state_dict "
                "of torch.distributed.checkpoint.state_dict"
            )
        options[number].pop("params")
        groups.append(Group(options[number], tuple(members)))
    return tuple(groups)


def _flattened_groups(keys: Iterable[str], prefix: str) -> tuple[Group, ...]:
    options: dict[str, dict[str, str]] = {}
    for key in keys:
        name, _, option = key.rpartition(".")
        options.setdefault(name, {})[option] = prefix + key
    return tuple(Group(of_name, (name,)) for name, of_name in options.items())


def _model_of(metadata: DcpMetadata, where: str, optimizer: str, members: list[str]) -> str:
    """Return the prefix under which every parameter of the optimizer is a tensor."""
    own = (f"{optimizer}state.", f"{optimizer}param_groups.")
    keys = [key for key in metadata.tensors if not key.startswith(own)]
    if not members:
        return _only_model(metadata, where)
    ending = "." + members[0]
    candidates = {key[: -len(members[0])] for key in keys if ("." + key).endswith(ending)}
    for name in members:
        candidates = {prefix for prefix in candidates if prefix + name in metadata.tensors}
        if not candidates:
            raise CheckpointError(
                f"{where}: the optimizer at '{optimizer}' updates '{name}', but no model in the "
                "folder has all of its parameters. Save model and optimizer together"
            )
    return _one_of(candidates, where)


def _only_model(metadata: DcpMetadata, where: str) -> str:
    """Return the prefix of the only dict of tensors, or of the one under a key ``model``."""
    folders = {metadata.paths[key][:-1] for key in metadata.tensors}
    if not folders:
        raise CheckpointError(f"{where}: no tensor in it")
    return _one_of({"".join(f"{part}." for part in folder) for folder in folders}, where)


def _one_of(prefixes: set[str], where: str) -> str:
    named = {prefix for prefix in prefixes if ("." + prefix).endswith(".model.")}
    chosen = named or prefixes
    if len(chosen) > 1:
        raise CheckpointError(
            f"{where}: which of {_quoted(chosen)} is the model cannot be told. Save it under the "
            "key 'model', and nothing else under one"
        )
    return next(iter(chosen))


def _quoted(prefixes: set[str]) -> str:
    names = sorted(prefix.removesuffix(".") or "(the top)" for prefix in prefixes)
    return ", ".join(f"'{name}'" for name in names[:5])
