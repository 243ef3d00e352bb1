"""DeepSpeed's blocks of offload and our `Offload`: read and written."""

from __future__ import annotations

from dataclasses import fields
from os import PathLike

from shardwise.homes import Offload, OffloadLike, folders_of, resolve_offload
from shardwise.interop.foreign_keys import Entry, JsonObject, Reader

_TITLES: dict[str, str] = {"params": "parameters", "optimizer": "the optimizer's state"}


class Homes:
    """Where a file offloads state: noted key by key, settled when the stage is known.

    DeepSpeed offloads parameters at stage 3 alone, and may leave the optimizer on the device then.
    Shardwise steps where the parameters are: the optimizer follows them to host memory.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._devices: dict[str, tuple[Entry, str]] = {}
        self._paths: dict[str, Entry] = {}
        self._ratio: Entry | None = None

    def note_device(self, kind: str, entry: Entry) -> None:
        """Note the device; true means "cpu" and false "none"."""
        is_flag = isinstance(entry.value, bool)
        where = ("none", "cpu")[entry.value] if is_flag else entry.value
        word = Entry(self._reader, entry.key, where).word(("none", "cpu", "nvme"))
        self._devices[kind] = entry, word

    def note_flag(self, kind: str, entry: Entry) -> None:
        """Note an old key, whose value is true or false."""
        entry.flag()
        self.note_device(kind, entry)

    def note_path(self, kind: str, entry: Entry) -> None:
        """Note the folder of "nvme"."""
        given = entry.value
        path = Entry(self._reader, entry.key, str(given) if isinstance(given, PathLike) else given)
        if not path.word() or "," in path.value:
            raise entry.refusal(f"expected a folder, without a comma, got {path.value!r}")
        self._paths[kind] = path

    def note_ratio(self, entry: Entry) -> None:
        """Note the share of the optimizer's state that is offloaded."""
        if not 0 <= entry.number() <= 1:
            raise entry.refusal(f"expected 0 to 1, got {entry.value!r}")
        self._ratio = entry

    def settle(self, stage: int | None) -> None:
        """Store ``offload`` and report on every key. ``stage`` None means undecided.

        A plan has an offload if the file has a key of it; a run if the file moves state.

        **Raises** ConfigError if state is to be in files without a folder, unless for a plan.
        """
        has_params = stage in (None, 3)
        params = self._place("params") if has_params else "device"
        said = self._place("optimizer")
        follows = said == "device" != params
        optimizer = "cpu" if follows else said
        ratio = self._ratio
        fraction = float(ratio.value) if ratio is not None and said != "device" else 1.0
        offload: str | Offload | None = None
        if optimizer != "device":
            offload = Offload(params, None, optimizer, fraction)
            if fraction == 1 and (params == "cpu" or not has_params):
                offload = optimizer  # one word says the same
        for kind, (entry, where) in self._devices.items():
            if kind == "params" and where != "none" and params == "device":
                why = f"full parameters stay on the device at stage {stage}, as in DeepSpeed"
                entry.ignored(why)
            elif kind == "optimizer" and where == "none" and follows:
                entry.ignored("it is in host memory: an optimizer steps where its parameters rest")
            elif where == "none":
                entry.mapped(f"on the device: {_TITLES[kind]}")
            else:
                also = "; the optimizer is in host memory too, where its parameters rest"
                entry.mapped(f"shard(offload={_spelled(offload)}){also if follows else ''}")
        for kind, path in self._paths.items():
            if folders_of(params if kind == "params" else said):
                path.mapped("the folder; its files have no names")
            else:
                path.ignored(f"{_TITLES[kind]}: not in files")
        if ratio is not None and said == "device":
            ratio.ignored("the optimizer's block offloads nothing")
        elif ratio is not None:
            ratio.mapped(f"fraction={fraction:g} of all that is offloaded, up to whole units")
        if offload is None and self._devices and self._reader.plans:
            offload = Offload()
        if offload is not None:
            self._reader.values["offload"] = offload

    def _place(self, kind: str) -> str:
        if kind not in self._devices:
            return "device"
        entry, where = self._devices[kind]
        if where != "nvme":
            return "device" if where == "none" else where
        if kind in self._paths:
            return f"nvme:{self._paths[kind].value}"
        if self._reader.plans:
            return "nvme"
        wanted = entry.key.replace("device", "nvme_path")
        raise entry.refusal(f"nvme needs a folder; add {wanted}, one on that disk")


def _spelled(offload: str | Offload | None) -> str:
    found = repr(offload) if isinstance(offload, str) or offload is None else offload_keys(offload)
    if isinstance(found, str):
        return found
    return f"Offload({', '.join(f'{name}={value!r}' for name, value in found.items())})"


def offload_keys(offload: str | Offload) -> str | JsonObject:
    """Return an offload as the key of `shardwise train`: a word, or what differs from defaults."""
    if isinstance(offload, str):
        return offload
    usual = {"grads": "cpu", "step_on": "host"}
    found = {x.name: getattr(offload, x.name) for x in fields(offload)}
    defaults = {x.name: x.default for x in fields(offload)}
    return {n: v for n, v in found.items() if v != defaults[n] and usual.get(n) != v}


def offload_blocks(asked: OffloadLike, stage: int) -> tuple[JsonObject, list[str]]:
    """Return DeepSpeed's blocks for an offload, and notes on parts that they leave out."""
    offload = resolve_offload(asked)
    lost = []
    if offload is not None and offload.activations != "device":
        lost.append("activations are left out: deepspeed.checkpointing has cpu_checkpointing")
    if offload is None or not offload.moves_state:
        return {}, lost

    def block(place: str) -> JsonObject:
        folders = folders_of(place)
        where = {"device": "nvme", "nvme_path": folders[0]} if folders else {"device": place}
        return {**where, "pin_memory": True}

    blocks = {"offload_optimizer": block(offload.optimizer)}
    if stage == 3 and offload.params != "device":
        blocks["offload_param"] = block(offload.params)
    elif folders_of(offload.params):
        lost.append("params stay out of files, where DeepSpeed has them at stage 3 alone")
    if offload.fraction < 1 and stage == 3:
        blocks["offload_optimizer"]["ratio"] = offload.fraction
    elif offload.fraction < 1:
        lost.append("fraction is left out, as DeepSpeed has ratio at stage 3 alone")
    if folders_of(offload.grads):
        lost.append("grads are left out, as DeepSpeed has no key for them")
    if any(len(folders_of(place)) > 1 for place in (offload.params, offload.optimizer)):
        lost.append("of several folders the first is written")
    return blocks, lost
