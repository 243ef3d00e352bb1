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
from collections.abc import Callable, Mapping

import numpy as np
import torch

from shardwise.device import accelerator_generator, set_accelerator_generator
from shardwise.errors import CheckpointError

_NUM_WORDS = 624  # of a Mersenne Twister
_NUMPY = struct.Struct(f"<{_NUM_WORDS}IIId")  # keys, position, has_gauss, cached_gaussian
_PYTHON = struct.Struct(f"<{_NUM_WORDS + 1}IId")  # keys and position, has_gauss, gauss_next
_PYTHON_VERSION = 3  # of random.getstate()
_NAMES = "torch", "accelerator", "numpy", "python"


def read_generators(device: torch.device) -> dict[str, str | None]:
    """Return the states of this process's generators, for JSON; draws nothing.

    They are base64, so JSON holds every bit. The accelerator's is null on a CPU run.

    **Raises** CheckpointError if numpy's global generator is not its default one.
    """
    of_numpy = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"generators: numpy's global one, expected MT19937, got {of_numpy['bit_generator']}; "
            "leave out np.random.set_bit_generator, and keep a Generator of your own in your state"
        )
    version, words, gauss = random.getstate()
    if version != _PYTHON_VERSION:
        raise CheckpointError(f"generators: Python's random state has an unknown version {version}")
    accelerator, inner = accelerator_generator(device), of_numpy["state"]
    cached = int(of_numpy["has_gauss"]), float(of_numpy["gauss"])
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "accelerator": None if accelerator is None else accelerator.numpy().tobytes(),
        "numpy": _NUMPY.pack(*inner["key"].tolist(), int(inner["pos"]), *cached),
        "python": _PYTHON.pack(*words, int(gauss is not None), gauss or 0.0),
    }
    return {k: None if s is None else base64.b64encode(s).decode() for k, s in states.items()}


def set_generators(value: object, device: torch.device) -> None:
    """Set this process's generators to states of `read_generators`.

    The next draws are bit-identical. All states are checked before the first is set. An
    accelerator that the saved run did not have (it ran on CPU) is seeded from the saved states.

    **Raises** CheckpointError for other values than `read_generators` returns.
    """
    setters, digest = check_generators(value, device)
    for set_state in setters:
        set_state()
    if len(setters) < len(_NAMES) and accelerator_generator(device) is not None:
        fresh = torch.Generator(device).manual_seed(_seed(digest))
        set_accelerator_generator(device, fresh.get_state())


def derive_generators(value: object, rank: int, device: torch.device) -> None:
    """Seed the generators of a rank that has no saved state: the number of ranks has changed.

    ``value`` is the state of the saved run's rank 0. The seeds depend on it and on ``rank``, so
    they are the same in each resume and differ between ranks.

    **Raises** CheckpointError for other values than `read_generators` returns.
    """
    _, saved = check_generators(value, device)
    mine = hashlib.blake2b(saved + struct.pack("<Q", rank), digest_size=32).digest()
    # torch's CPU generator uses 32 bits of a seed: adding the rank makes all ranks differ.
    torch.manual_seed((_seed(saved) + rank) % 2**63)
    np.random.seed(np.frombuffer(mine, "<u4"))
    random.seed(mine)


def check_generators(value: object, device: torch.device) -> tuple[list[Callable[[], None]], bytes]:
    """Try every state on a new generator; return what sets each, and the digest of all.

    Nothing is changed. **Raises** as `set_generators`.
    """
    if not isinstance(value, Mapping) or set(value) != set(_NAMES):
        raise CheckpointError(
            f"generators: expected the states {', '.join(_NAMES)}, got "
            f"{sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__}"
        )
    setters, part = list[Callable[[], None]](), ""
    try:
        for part in _NAMES:
            if part == "accelerator" and value[part] is None:
                continue
            if type(value[part]) is not str:
                raise TypeError(f"expected base64, got a {type(value[part]).__name__}")
            data = base64.b64decode(value[part], validate=True)
            if part != "accelerator" or accelerator_generator(device) is not None:
                setters.append(_tried(part, data, device))
    except (ValueError, TypeError, RuntimeError, OverflowError, struct.error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"generators: the saved state of the {part} generator does not fit: {reason}; load "
            "with restore_generators=False to go on with other random draws"
        ) from None
    text = json.dumps([value[name] for name in _NAMES])
    return setters, hashlib.blake2b(text.encode(), digest_size=32).digest()


def _tried(part: str, data: bytes, device: torch.device) -> Callable[[], None]:
    """Try a state on a new generator; return the call that sets it."""
    if part in ("torch", "accelerator"):
        state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if part == "torch":
            torch.Generator().set_state(state)
            return lambda: torch.set_rng_state(state)
        torch.Generator(device).set_state(state)
        return lambda: set_accelerator_generator(device, state)
    *words, has_gauss, gauss = (_NUMPY if part == "numpy" else _PYTHON).unpack(data)
    if words[-1] > _NUM_WORDS or has_gauss > 1 or not math.isfinite(gauss):
        raise ValueError(f"position {words[-1]}, has_gauss {has_gauss}, gauss {gauss}")
    if part == "numpy":
        of_numpy = ("MT19937", np.array(words[:-1], np.uint32), words[-1], has_gauss, gauss)
        np.random.RandomState(0).set_state(of_numpy)
        return lambda: np.random.set_state(of_numpy)
    of_python = (_PYTHON_VERSION, tuple(words), gauss if has_gauss else None)
    random.Random(0).setstate(of_python)
    return lambda: random.setstate(of_python)


def _seed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1
