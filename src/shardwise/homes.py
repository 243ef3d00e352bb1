"""Places of training state: the device, host memory or files; the `Offload` setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.stages import Stage

LOAD_BYTES = 128 << 20  # of one load: long copies, and little memory on the device
NUM_BUFFERS = 3  # of a disk: one is read, one stepped, one written
COPIES_IN_MEMORY = 2  # of a run's state at most, of one step each: the newest and the one before
LOADS = 3  # at once: one is fetched, one stepped, one evicted
_EXPECTED = "'device', 'cpu' (host memory) or 'nvme:FOLDER' (files in a folder of this machine)"


@dataclass(frozen=True)
class Offload:
    """Where each kind of state rests: "device", "cpu" (host memory) or "nvme:FOLDER".

    ``params`` are each rank's slices, as gathers read them: on the "device" in the dtype that
    layers compute with, while the masters are in host memory. At stages 0 to 2, whose full
    parameters stay on the device, "device" and "cpu" are the same. ``grads`` are the reduced
    gradients; None is host memory. ``optimizer`` is the optimizer's state. Several folders,
    separated by commas, share the bytes. ``fraction`` is the offloaded share of the bytes, rounded
    up to whole units; the first units stay on the device, as the next forward pass waits for their
    step. ``step_on`` is where the optimizer steps; None is "host". On the "device", a unit is
    stepped in loads of a fixed size, for elementwise optimizers. ``activations`` are the inputs of
    checkpointed blocks: with "cpu" they are in host memory between forward and recomputation,
    except those of the last block.

    **Raises** ConfigError for a value that a field does not take, and for fields that contradict
    each other.
    """

    params: str = "device"
    grads: str | None = None
    optimizer: str = "device"
    fraction: float = 1.0
    step_on: Literal["host", "device"] | None = None
    activations: str = "device"

    def __post_init__(self) -> None:
        """Check the values where they are written; "nvme" without a folder is a plan's."""
        for name in ("params", "grads", "optimizer"):
            place = getattr(self, name)
            if place is not None and _tier(place, False) is None:
                raise ConfigError(f"offload: {name}={place!r}: expected {_EXPECTED}")
        if self.activations not in ("device", "cpu"):
            raise ConfigError(
                f"offload: activations={self.activations!r}: expected 'device' or 'cpu' (host "
                "memory)"
            )
        fraction: object = self.fraction
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ConfigError(f"offload: fraction={self.fraction!r}: expected a number from 0 to 1")
        if self.step_on not in (None, "host", "device"):
            raise ConfigError(f"offload: step_on={self.step_on!r}: expected 'host' or 'device'")
        _check_combination(self)

    @property
    def moves_state(self) -> bool:
        """Return True if more than activations is offloaded."""
        return self.optimizer != "device" and self.fraction > 0

    @property
    def tiers(self) -> tuple[str, str, str, float, str, str]:
        """The settings that must agree on all ranks: all except the folders."""
        places = (self.params, self.grads or "", self.optimizer)
        params, grads, optimizer = (place.partition(":")[0] for place in places)
        return params, grads, optimizer, self.fraction, self.step_on or "host", self.activations

    def num_staying(self, numels: Sequence[int]) -> int:
        """Return how many units, from the first, stay on the device, by numbers of elements."""
        if not self.moves_state:
            return len(numels)
        stay = (1 - self.fraction) * sum(numels)
        return sum(total <= stay for total in accumulate(numels))


def tier_of(place: str | None) -> str:
    """Return the tier of a checked place: "device", "cpu" or "nvme"; None is "cpu"."""
    return (place or "cpu").partition(":")[0]


def folders_of(place: str | None) -> tuple[str, ...]:
    """Return the folders of a place in files; () for other places."""
    tier, _, rest = (place or "").partition(":")
    return tuple(rest.split(",")) if tier == "nvme" else ()


OffloadLike = str | Offload | None


def offload_of(value: str | Mapping[str, Any] | OffloadLike) -> OffloadLike:
    """Return an `Offload` from the fields in a file or a flag; return other values unchanged.

    **Raises** ConfigError for an unknown field.
    """
    if not isinstance(value, Mapping):
        return value
    known = [field.name for field in fields(Offload)]
    for name in value:
        if name not in known:
            raise ConfigError(f"offload: {name!r} is none of {', '.join(sorted(known))}")
    return Offload(**value)


def resolve_offload(asked: OffloadLike, *, names_folders: bool = True) -> Offload | None:
    """Check and complete an offload; return None if all state stays on the device.

    "cpu" is everything in host memory; "nvme:FOLDER" also puts the optimizer's state in files.
    With ``names_folders`` False, "nvme" is allowed too, for plans, which open no files.

    **Raises** ConfigError with the field, its value and the allowed values.
    """
    if asked is None:
        return None
    if isinstance(asked, str):
        if _tier(asked, names_folders) not in ("cpu", "nvme"):
            raise ConfigError(
                f"offload={asked!r}: expected 'cpu' (what a rank owns, and the optimizer's step, "
                "are in host memory), 'nvme:FOLDER' (the optimizer's state is in files), a "
                "shardwise.Offload for each kind, or None"
            )
        return resolve_offload(Offload("cpu", "cpu", asked), names_folders=names_folders)
    if not isinstance(asked, Offload):
        raise ConfigError(f"offload={asked!r}: expected 'cpu', a shardwise.Offload or None")
    for name in ("params", "grads", "optimizer"):
        place = getattr(asked, name)
        if names_folders and place is not None and _tier(place, True) is None:
            raise ConfigError(f"offload: {name}={place!r}: expected {_EXPECTED}")
    if asked.moves_state:
        return replace(asked, grads=asked.grads or "cpu", step_on=asked.step_on or "host")
    return Offload(activations="cpu") if asked.activations == "cpu" else None


def check_coded(gather: str, stage: Stage, offload: Offload | None, layout: str) -> None:
    """Check that gathers can be encoded: parameters are gathered, from slices and not a cast copy.

    **Raises** ConfigError with the remedy.
    """
    if not stage.shards_state:
        raise ConfigError(
            f"precision.gather={gather!r}: nothing is gathered at stage {stage.number}; use stage "
            "1, 2 or 3, or leave gather= out"
        )
    if layout == "matrices":
        raise ConfigError(
            f"precision.gather={gather!r}: with layout='matrices' each matrix is broadcast by its "
            "owner, as it is computed with; use layout 'rows' or 'flat', or leave gather= out"
        )
    moves = offload is not None and offload.moves_state
    if moves and stage.frees_after_backward and offload.params == "device":  # type: ignore[union-attr]
        raise ConfigError(
            f"precision.gather={gather!r}: offload with params='device' keeps a copy of the slices "
            f"in the dtype of computation at stage {stage.number}, which gathers read; let params= "
            "rest where optimizer= does, use stage 1 or 2, or leave gather= out"
        )


def _tier(place: object, names_folders: bool) -> str | None:
    """Return the tier of a place: "device", "cpu" or "nvme"; None if invalid."""
    if place in ("device", "cpu") or (place == "nvme" and not names_folders):
        return str(place)
    tier, _, folders = place.partition(":") if isinstance(place, str) else ("", "", "")
    return tier if tier == "nvme" and all(folders.split(",")) else None


def _check_combination(asked: Offload) -> None:
    if asked.step_on == "host" and asked.optimizer == "device":
        raise ConfigError(
            "offload: step_on='host' with optimizer='device': the state would be on the device, "
            "and the step is where its state is; leave step_on out, or let optimizer= be 'cpu'"
        )
    if asked.optimizer == "device" and asked.params != "device":
        raise ConfigError(
            f"offload: params={asked.params!r} with optimizer='device': an optimizer's state "
            "rests where its parameters do; let optimizer= be 'cpu' or 'nvme:FOLDER'"
        )
    if asked.grads is not None and (asked.grads == "device") != (asked.optimizer == "device"):
        wanted = "'device'" if asked.optimizer == "device" else "'cpu' or 'nvme:FOLDER'"
        raise ConfigError(
            f"offload: grads={asked.grads!r}: gradients rest with the optimizer's state; leave it "
            f"out, or use {wanted}"
        )
