"""Where a file wants state to rest, as ``offload`` of a run or a plan; a run's, as such a file.

DeepSpeed offloads parameters at stage 3 alone, and may leave the optimizer on the device then. Ours
steps where its parameters rest: it follows them to host memory, and the report says so.
"""

from dataclasses import fields
from os import PathLike
from typing import Any, Literal

from shardwise.homes import Offload, OffloadLike, folders_of, resolve_offload
from shardwise.interop.deepspeed.reading import Reader

Kind = Literal["params", "optimizer"]

_DEVICES = ("none", "cpu", "nvme")
_TITLES = {"params": "parameters", "optimizer": "the optimizer's state"}


class Homes:
    """What one file says of homes: noted key by key, settled when the stage is known."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._devices: dict[Kind, tuple[str, Any, str]] = {}  # key, value, one of _DEVICES
        self._paths: dict[Kind, tuple[str, str]] = {}
        self._ratio: tuple[str, float] | None = None

    def note_device(self, kind: Kind, key: str, value: Any) -> None:
        """Note ``device`` of a block; true and false, of old keys, are "cpu" and "none"."""
        where = {True: "cpu", False: "none"}[value] if isinstance(value, bool) else value
        self._devices[kind] = key, value, self._reader.word(key, where, _DEVICES)

    def note_path(self, kind: Kind, key: str, value: Any) -> None:
        """Note ``nvme_path`` of a block."""
        path = self._reader.word(key, str(value) if isinstance(value, PathLike) else value)
        if not path or "," in path:
            raise self._reader.refusal(key, f"expected a folder, without a comma, got {path!r}")
        self._paths[kind] = key, path

    def note_ratio(self, key: str, value: Any) -> None:
        """Note ``ratio``, which only the optimizer's block has."""
        if not 0 <= self._reader.number(key, value) <= 1:
            raise self._reader.refusal(key, f"expected 0 to 1, got {value!r}")
        self._ratio = key, float(value)

    def settle(self, stage: int | None) -> str | Offload | None:
        """Return ``offload``, None where the file says nothing that moves state; tell every key.

        A plan has an offload wherever the file has a key of it. ``stage`` is None where the file
        leaves it open.

        **Raises** ConfigError where state is to rest in files of no folder, but for a plan.
        """
        has_params = stage in (None, 3)
        params = self._place("params") if has_params else "device"
        said = self._place("optimizer")
        optimizer = "cpu" if said == "device" != params else said
        fraction = self._ratio[1] if self._ratio is not None and said != "device" else 1.0
        offload: str | Offload | None = None
        if optimizer != "device":
            offload = _shortest(Offload(params, None, optimizer, fraction), has_params)
        self._tell_devices(stage, offload, params, said)
        self._tell_others(params, said)
        if offload is None and self._devices and self._reader.plans:
            return Offload()
        return offload

    def _place(self, kind: Kind) -> str:
        key, _, where = self._devices.get(kind, ("", None, "none"))
        if where == "nvme" and kind not in self._paths:
            if self._reader.plans:
                return "nvme"
            wanted = key.replace("device", "nvme_path")
            raise self._reader.refusal(key, f"nvme needs a folder; add {wanted}, one on that disk")
        return {"none": "device", "cpu": "cpu"}.get(where) or f"nvme:{self._paths[kind][1]}"

    def _tell_devices(
        self, stage: int | None, offload: str | Offload | None, params: str, said: str
    ) -> None:
        follows = said == "device" != params
        for kind, (key, value, where) in self._devices.items():
            if kind == "params" and where != "none" and params == "device":
                why = f"full parameters stay on the device at stage {stage}, as in DeepSpeed"
                self._reader.ignored(key, value, why)
            elif kind == "optimizer" and where == "none" and follows:
                why = "it is in host memory: an optimizer steps where its parameters rest"
                self._reader.ignored(key, value, why)
            elif where == "none":
                self._reader.mapped(key, value, f"on the device: {_TITLES[kind]}")
            else:
                also = "; the optimizer is in host memory too, where its parameters rest"
                spelled = repr(offload)
                if isinstance(offload, Offload):
                    keys = offload_keys(offload).items()
                    spelled = f"Offload({', '.join(f'{name}={value!r}' for name, value in keys)})"
                text = f"shard(offload={spelled}){also if follows else ''}"
                self._reader.mapped(key, value, text)

    def _tell_others(self, params: str, said: str) -> None:
        for kind, (key, path) in self._paths.items():
            if folders_of(params if kind == "params" else said):
                self._reader.mapped(key, path, "the folder; its files have no names")
            else:
                self._reader.ignored(key, path, f"{_TITLES[kind]}: not in files")
        if self._ratio is not None and said == "device":
            self._reader.ignored(*self._ratio, "the optimizer's block offloads nothing")
        elif self._ratio is not None:
            text = f"fraction={self._ratio[1]:g} of all that is offloaded, up to whole units"
            self._reader.mapped(*self._ratio, text)


def _shortest(offload: Offload, has_params: bool) -> str | Offload:
    """Return one word where it says the same: "device" is "cpu" for parameters below stage 3."""
    is_whole = offload.fraction == 1 and (offload.params == "cpu" or not has_params)
    return offload.optimizer if is_whole else offload


def offload_keys(offload: str | Offload) -> Any:
    """Return an offload as the key of `shardwise train`: a word, or what differs from defaults."""
    if isinstance(offload, str):
        return offload
    found = {x.name: getattr(offload, x.name) for x in fields(offload)}
    found = {x.name: found[x.name] for x in fields(offload) if found[x.name] != x.default}
    usual = {"grads": "cpu", "step_on": "host"}
    return {name: value for name, value in found.items() if usual.get(name) != value}


def blocks_of(asked: OffloadLike, stage: int) -> tuple[dict[str, Any], list[str]]:
    """Return DeepSpeed's blocks for an offload, and what they leave out."""
    offload = resolve_offload(asked)
    lost = []
    if offload is not None and offload.activations != "device":
        lost.append("activations are left out: deepspeed.checkpointing has cpu_checkpointing")
    if offload is None or not offload.moves_state:
        return {}, lost
    blocks = {"offload_optimizer": _block(offload.optimizer)}
    if stage == 3 and offload.params != "device":
        blocks["offload_param"] = _block(offload.params)
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


def _block(place: str) -> dict[str, Any]:
    folders = folders_of(place)
    where = {"device": "nvme", "nvme_path": folders[0]} if folders else {"device": place}
    return {**where, "pin_memory": True}
