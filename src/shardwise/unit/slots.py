"""The attributes of modules that hold one unit's parameters, sharded or full."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.errors import ShardError, StateError
from shardwise.unit.full_parameter import DataAccess, ValueWatch

if TYPE_CHECKING:
    from shardwise.unit.param import ShardedParam


class Slots:
    """Puts full parameters into modules for calls (`bind` to `unbind`), and while pinned.

    - ``is_pinned``: the unit stays full until it is unpinned. While it is pinned, `show` puts the
      full parameters into the modules also between calls.
    - ``binds``: if False, calls change nothing, and the unit itself puts its parameters into the
      modules; see Note [When modules hold full parameters].
    - ``access``: reads of ``data`` and assignments to it, of the full parameters.
    - ``watch``: compares the values of full parameters, under `check.writes`.
    """

    def __init__(self, binds: bool) -> None:
        self.is_pinned = False
        self._binds = binds
        self._places: list[tuple[dict[str, nn.Parameter | None], str, ShardedParam]] = []
        self._depth = 0  # number of calls that are running, and one more while shown
        self._is_shown = False
        # The full parameters that `bind` has put into the modules, and their versions at that time.
        self._fulls: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._written: list[str] = []  # errors about writes while shown
        # Of DTensors, by name: the local tensor, and the storage of the DTensor itself.
        self._memory: dict[str, tuple[torch.Tensor, int]] = {}
        self.access = DataAccess()
        self.watch: ValueWatch | None = None

    def add(self, param: "ShardedParam") -> None:
        """Add a parameter, and put its sharded form into the modules that use it."""
        param.put_in_modules(param.sharded)
        for use in param.uses:
            self._places.append((use.module._parameters, use.attribute, param))

    def replace_params(self, params: "Iterable[ShardedParam]") -> None:
        """Replace the parameters, after some were moved between calls."""
        self._places = []
        self._fulls = []
        self._versions = []
        for param in params:
            self.add(param)

    @property
    def are_full(self) -> bool:
        """Tell whether the full parameters are in the modules now."""
        return self._depth > 0

    def bind(self) -> None:
        """Put the full parameters into the modules for one call.

        **Raises** StateError if a module holds another parameter than the sharded one.
        """
        if not self._binds:
            self._check_assignments()
            return
        self._depth += 1
        if self._depth > 1:
            return
        for params, attribute, param in self._places:  # check all before any is changed
            current = params.get(attribute)
            if current is not param.sharded or getattr(current, "_owner", None) is not param:
                self._depth = 0
                raise StateError(
                    f"parameter '{param.name}' was replaced after shard(), by model.to(), .half(), "
                    "load_state_dict(assign=True) or an assignment; do that before shard()"
                )
        fulls = [param.full for _, _, param in self._places]
        versions = [full._version for full in fulls]
        if versions != self._versions:
            self._check_versions(fulls, versions)
        for (params, attribute, _), full in zip(self._places, fulls, strict=True):
            params[attribute] = full
        self._fulls, self._versions = fulls, versions
        if self.watch is not None:
            self.watch.begin(fulls)

    def _check_assignments(self) -> None:
        """Raise StateError if ``p.data = x`` was called on a DTensor, whose local tensor stays.

        The assignment leaves the memory of ``x`` in the DTensor itself, which has no values there.
        """
        for _, _, param in self._places:
            sharded = param.sharded
            memory = sharded._local_tensor, sharded.untyped_storage()._cdata
            local_before, storage_before = self._memory.setdefault(param.name, memory)
            if memory[1] == storage_before:
                continue
            self._memory[param.name] = memory
            if memory[0] is local_before:  # else the whole parameter was exchanged
                raise StateError(
                    f"parameter '{param.name}': `p.data = x` changes nothing in a DTensor, so it "
                    "has its old values. Write `p.copy_(x)` under torch.no_grad(), or inside of "
                    "`with shardwise.gathered(model, writeback=True):`"
                )

    def _check_versions(self, fulls: list[nn.Parameter], versions: list[int]) -> None:
        """Raise ShardError if a full parameter was written between two calls."""
        places = zip(self._places, self._fulls, self._versions, fulls, versions, strict=False)
        for (_, _, param), full_before, before, full, version in places:
            if full is full_before and version != before:
                self._depth = 0
                self._fulls = fulls
                self._versions = versions
                raise ShardError(
                    f"parameter '{param.name}' was written through a tensor made of it with grad "
                    "enabled (p[0].detach(), p.view(-1).detach()): it is a copy there and the "
                    "change is lost. Write p.data[0], or under torch.no_grad()"
                )

    def unbind(self) -> list[str]:
        """Put the ShardTensors back; return an error text for each write that is lost.

        See Note [Writes inside a forward pass]: other writes are kept.
        """
        if self._depth == 0:
            return []
        self._depth -= 1
        if self._depth:
            return []
        lost: list[str] = []
        written_ids: set[int] = set()  # ids of full parameters that were written or replaced
        places = zip(self._places, self._fulls, self._versions, strict=True)
        for (params, attribute, param), full, version in places:
            current = params.get(attribute)
            params[attribute] = param.sharded
            if current is not full or full._version != version:
                written_ids.add(id(full))
            if current is not full and full is param.full:
                lost += self._keep_write(param, current, in_place=False)
            elif full._version != version:
                param.restore_memory()
                lost.append(f"'{param.name}' was written")
        if self.access.reads or self.access.assigned:
            written = self.access.find_written()
            for _, _, param in self._places:
                if id(param.full) in written:
                    written_ids.add(id(param.full))
                    in_place = written[id(param.full)]
                    lost += self._keep_write(param, param.full, in_place=in_place)
            self.access.forget()
        if lost:
            self._versions = [full._version for full in self._fulls]
        if self.watch is not None:
            names = [param.name for _, _, param in self._places]
            fulls = zip(names, self._fulls, strict=True)
            self.watch.end((name, full) for name, full in fulls if id(full) not in written_ids)
        return lost

    def _keep_write(
        self, param: "ShardedParam", value: nn.Parameter | None, *, in_place: bool
    ) -> list[str]:
        """Keep a write to a full parameter; return an error text if it cannot be kept."""
        if value is None:
            return [f"'{param.name}' was removed"]
        reads = self.access.reads_of(param.full)
        reason = param.keep_written(value, in_place=in_place, reads=reads)
        if reason is not None and param.holds_codes:
            reason += (
                " (bitsandbytes packs 4-bit weights anew in evaluation on some CPUs: set "
                "support_avx512bf16_for_cpu = False on its Linear4bit modules)"
            )
        return [] if reason is None else [f"'{param.name}' was written or replaced: {reason}"]

    def unbind_all(self) -> None:
        """Put the ShardTensors back after an interrupted forward pass, unless shown."""
        if self._depth > self._is_shown:
            self._depth = 1 + self._is_shown
            self.unbind()

    def show(self) -> None:
        """Put the full parameters of a pinned unit into the modules until `hide`."""
        if not self._is_shown:
            self.bind()
            self._is_shown = True
            if self.watch is not None:
                self.watch.forget()

    def hide(self) -> None:
        """End `show`; copy ``requires_grad`` of the full parameters to the sharded ones."""
        if not self._is_shown:
            return
        self._is_shown = False
        self._written = self.unbind() or self._written
        for _, _, param in self._places:
            if param.full.requires_grad != param.sharded.requires_grad:
                param.sharded.requires_grad_(param.full.requires_grad)

    def take_written(self) -> list[str]:
        """Return the errors about full parameters that were written while shown, and drop them."""
        written, self._written = self._written, []
        return written
