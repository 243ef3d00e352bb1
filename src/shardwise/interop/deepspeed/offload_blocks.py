"""DeepSpeed's blocks of offload and our `Offload`: read and written."""

from __future__ import annotations

from dataclasses import fields, replace
from os import PathLike

from shardwise.homes import Offload, OffloadLike, folders_of, resolve_offload
from shardwise.interop.foreign_keys import Entry, JsonObject, Reader

_TITLES: dict[str, str] = {"params": "parameters", "optimizer": "the optimizer's state"}


def store_offload(reader: Reader, stage: int | None) -> None:
    """Store the ``offload`` of ``reader.homes`` and report on each key; None is an open stage.

    DeepSpeed offloads parameters at stage 3 alone, and may leave the optimizer on the device then.
    Shardwise steps where the parameters are: the optimizer follows them to host memory. A plan has
    an offload if the file has a key of it; a run if the file moves state.

    **Raises** ConfigError for a wrong value, or if state is to be in files without a folder, unless
    for a plan.
    """
    homes, ratio = reader.homes, reader.homes.get("ratio")
    devices = {kind: entry for kind in _TITLES if (entry := homes.get(f"{kind} device"))}
    folders = {kind: entry for kind in _TITLES if (entry := homes.get(f"{kind} folder"))}
    kinds = _TITLES if stage in (None, 3) else ("optimizer",)
    places = {kind: _place(devices.get(kind), folders.get(kind)) for kind in kinds}
    params, asked = places.get("params", "device"), places["optimizer"]
    follows = asked == "device" != params
    optimizer = "cpu" if follows else asked
    if ratio is not None and not 0 <= ratio.number() <= 1:
        raise ratio.refusal(f"expected 0 to 1, got {ratio.value!r}")
    fraction = float(ratio.value) if ratio is not None and asked != "device" else 1.0
    offload: str | Offload | None = None
    if optimizer != "device":
        offload = Offload(params, None, optimizer, fraction)
        if fraction == 1 and (params == "cpu" or "params" not in places):
            offload = optimizer  # one word says the same
    for kind, entry in devices.items():
        is_off = _word(entry) == "none"
        if kind not in places and not is_off:
            entry.tell(
                "ignored", f"full parameters stay on the device at stage {stage}, as in DeepSpeed"
            )
        elif kind == "optimizer" and is_off and follows:
            entry.tell(
                "ignored", "it is in host memory: an optimizer steps where its parameters rest"
            )
        elif is_off:
            entry.tell("mapped", f"on the device: {_TITLES[kind]}")
        else:
            also = "; the optimizer is in host memory too, where its parameters rest"
            entry.tell("mapped", f"shard(offload={_spelled(offload)}){also if follows else ''}")
    for kind, folder in folders.items():
        if folders_of(places.get(kind)):
            folder.tell("mapped", "the folder; its files have no names")
        elif _path(folder):
            folder.tell("ignored", f"{_TITLES[kind]}: not in files")
    if ratio is not None and asked == "device":
        ratio.tell("ignored", "the optimizer's block offloads nothing")
    elif ratio is not None:
        ratio.tell("mapped", f"fraction={fraction:g} of all that is offloaded, up to whole units")
    if offload is None and devices and reader.plans:
        offload = Offload()
    if offload is not None:
        reader.values["offload"] = offload


def _word(device: Entry) -> str:
    where = device.value
    where = ("none", "cpu")[where] if isinstance(where, bool) else where  # of the old keys
    return replace(device, value=where).word(("none", "cpu", "nvme"))


def _path(folder: Entry) -> str:
    path = str(folder.value) if isinstance(folder.value, PathLike) else folder.value
    if not replace(folder, value=path).word() or "," in path:
        raise folder.refusal(f"expected a folder, without a comma, got {path!r}")
    return str(path)


def _place(device: Entry | None, folder: Entry | None) -> str:
    """Return the place of an `Offload` for the two keys of one kind of state."""
    where = "none" if device is None else _word(device)
    if device is None or where != "nvme":
        return "device" if where == "none" else where
    if folder is not None:
        return f"nvme:{_path(folder)}"
    if device.reader.plans:
        return "nvme"
    wanted = device.key.replace("device", "nvme_path")
    raise device.refusal(f"nvme needs a folder; add {wanted}, one on that disk")


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
