"""This process's random generators: torch (CPU and accelerator), numpy's and Python's global ones.

Dropout, shuffling and augmentation draw from them, so a resumed run has the same bits only if
every rank continues from the state of its generators.
"""

import base64
import hashlib
import json
import math
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.device import accelerator_generator, set_accelerator_generator
from shardwise.errors import CheckpointError

_NUM_WORDS = 624  # of a Mersenne Twister
_NUMPY = struct.Struct(f"<{_NUM_WORDS}IIId")  # keys, position, has_gauss, cached_gaussian
_PYTHON = struct.Struct(f"<{_NUM_WORDS + 1}IId")  # keys and position, has_gauss, gauss_next
_PYTHON_VERSION = 3  # of random.getstate()
_NAMES = "torch", "accelerator", "numpy", "python"


@dataclass(frozen=True)
class _Checked:
    """States that the generators accept."""

    of_torch: torch.Tensor
    of_accelerator: torch.Tensor | None
    of_numpy: tuple[Any, ...]
    of_python: tuple[Any, ...]
    digest: bytes


def read_generators(device: torch.device) -> dict[str, str | None]:
    """Return the states of this process's generators, for JSON; draws nothing.

    They are base64, so JSON holds every bit. The accelerator's is null on a CPU run.

    **Raises** CheckpointError if numpy's global generator is not its default one.
    """
    accelerator = accelerator_generator(device)
    return {
        "torch": _write(torch.get_rng_state().numpy().tobytes()),
        "accelerator": _write(accelerator.numpy().tobytes()) if accelerator is not None else None,
        "numpy": _write(_pack_numpy()),
        "python": _write(_pack_python()),
    }


def set_generators(value: object, device: torch.device) -> None:
    """Set this process's generators to states of `read_generators`.

    The next draws are bit-identical. All states are checked before the first is set. An
    accelerator that the saved run did not have (it ran on CPU) is seeded from the saved states.

    **Raises** CheckpointError for other values than `read_generators` returns.
    """
    checked = _check(value, device)
    torch.set_rng_state(checked.of_torch)
    np.random.set_state(checked.of_numpy)
    random.setstate(checked.of_python)
    if checked.of_accelerator is not None:
        set_accelerator_generator(device, checked.of_accelerator)
    elif accelerator_generator(device) is not None:
        fresh = torch.Generator(device).manual_seed(_seed(checked.digest))
        set_accelerator_generator(device, fresh.get_state())


def derive_generators(value: object, rank: int, device: torch.device) -> None:
    """Seed the generators of a rank that has no saved state: the number of ranks has changed.

    ``value`` is the state of the saved run's rank 0. The seeds depend on it and on ``rank``, so
    they are the same in each resume and differ between ranks.

    **Raises** CheckpointError for other values than `read_generators` returns.
    """
    saved = _check(value, device).digest
    mine = hashlib.blake2b(saved + struct.pack("<Q", rank), digest_size=32).digest()
    # torch's CPU generator uses 32 bits of a seed: adding the rank makes all ranks differ.
    torch.manual_seed((_seed(saved) + rank) % 2**63)
    np.random.seed(np.frombuffer(mine, "<u4"))
    random.seed(mine)


def check_generators(value: object, device: torch.device) -> None:
    """Check states for `set_generators`; nothing is changed. **Raises** as it."""
    _check(value, device)


def _check(value: object, device: torch.device) -> _Checked:
    """Try every state on a new generator."""
    if not isinstance(value, Mapping) or set(value) != set(_NAMES):
        raise CheckpointError(
            f"generators: expected the states {', '.join(_NAMES)}, got "
            f"{sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__}"
        )
    part = ""
    try:
        part = "torch"
        cpu = _tensor(value["torch"])
        torch.Generator().set_state(cpu)
        part = "accelerator"
        accelerator = None
        if value["accelerator"] is not None:
            state = _tensor(value["accelerator"])
            if accelerator_generator(device) is not None:
                torch.Generator(device).set_state(state)
                accelerator = state
        part = "numpy"
        of_numpy = _unpack_numpy(_read(value["numpy"]))
        np.random.RandomState(0).set_state(of_numpy)
        part = "python"
        of_python = _unpack_python(_read(value["python"]))
        random.Random(0).setstate(of_python)
    except (ValueError, TypeError, RuntimeError, OverflowError, struct.error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"generators: the saved state of the {part} generator does not fit: {reason}. It is "
            "damaged, or another version of torch wrote it; load without the generators to go on "
            "with other random draws"
        ) from None
    text = json.dumps([value[name] for name in _NAMES])
    digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
    return _Checked(cpu, accelerator, of_numpy, of_python, digest)


def _pack_numpy() -> bytes:
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise CheckpointError(
            "generators: expected numpy's global generator to be its default, MT19937, got "
            f"{state['bit_generator']}; leave out np.random.set_bit_generator, and keep a "
            "Generator of your own in your state"
        )
    inner = state["state"]
    return _NUMPY.pack(
        *inner["key"].tolist(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])
    )


def _unpack_numpy(data: bytes) -> tuple[Any, ...]:
    *keys, position, has_gauss, gauss = _NUMPY.unpack(data)
    if position > _NUM_WORDS or has_gauss > 1 or not math.isfinite(gauss):
        raise ValueError(f"position {position}, has_gauss {has_gauss}, cached_gaussian {gauss}")
    return ("MT19937", np.array(keys, np.uint32), position, has_gauss, gauss)


def _pack_python() -> bytes:
    version, words, gauss = random.getstate()
    if version != _PYTHON_VERSION:
        raise CheckpointError(f"generators: Python's random state has an unknown version {version}")
    return _PYTHON.pack(*words, int(gauss is not None), gauss or 0.0)


def _unpack_python(data: bytes) -> tuple[Any, ...]:
    *words, has_gauss, gauss = _PYTHON.unpack(data)
    if words[-1] > _NUM_WORDS or has_gauss > 1 or not math.isfinite(gauss):
        raise ValueError(f"position {words[-1]}, has_gauss {has_gauss}, gauss_next {gauss}")
    return (_PYTHON_VERSION, tuple(words), gauss if has_gauss else None)


def _seed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1


def _tensor(text: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(_read(text)), dtype=torch.uint8)


def _write(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _read(text: object) -> bytes:
    if type(text) is not str:
        raise TypeError(f"expected base64, got a {type(text).__name__}")
    return base64.b64decode(text, validate=True)
