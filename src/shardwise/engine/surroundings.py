"""torch's thread-local state, copied to other threads, and states of random generators."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from shardwise.device import accelerator_generator, set_accelerator_generator, time_of


class Generators:
    """The states of torch's random generators, of the CPU and of the model's device.

    Each micro-batch continues from separate states. Activation checkpointing restores, in backward,
    the state from before a block's draws, which other micro-batches' draws must not have changed.
    """

    def __init__(self, device: torch.device, of_cpu: Any, of_device: Any) -> None:
        self._device = device
        self._of_cpu = of_cpu
        self._of_device = of_device

    @classmethod
    def of_caller(cls, device: torch.device) -> "Generators":
        """Read the current states."""
        return cls(device, torch.get_rng_state(), accelerator_generator(device))

    def derive(self, number: int) -> "Generators":
        """Return states derived from these and ``number``; equal inputs give equal states."""
        states = [state for state in (self._of_cpu, self._of_device) if state is not None]
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8)
        for state in states:
            digest.update(state.numpy().tobytes())
        seed = int.from_bytes(digest.digest(), "little") >> 1
        made = [torch.Generator(each).manual_seed(seed) for each in ("cpu", self._device)]
        of_device = None if self._of_device is None else made[1].get_state()
        return Generators(self._device, made[0].get_state(), of_device)

    def put(self) -> None:
        """Set torch's generators to these states."""
        torch.set_rng_state(self._of_cpu)
        if self._of_device is not None:
            set_accelerator_generator(self._device, self._of_device)


class Surroundings:
    """The caller's thread-local state of torch, to enter in other threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = {"cpu", device.type}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in sorted(kinds)
            if torch.is_autocast_enabled(kind)
        ]
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._saved_tensors = _saved_tensors_hooks()
        self._stream = time_of(device).current_stream()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the state in this thread."""
        with ExitStack() as stack:
            if self._device.index is not None:
                torch.accelerator.set_device_index(self._device.index)
            stack.enter_context(self._stream.use())
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype, caches in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            for pack, unpack in self._saved_tensors:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            for mode in self._dispatch_modes:
                _push_mode(mode)
                key = getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None)
                stack.callback(_pop_mode, key)
            for mode in self._function_modes:
                _push_function_mode(mode)
                stack.callback(_pop_function_mode)
            yield


def _saved_tensors_hooks() -> list[tuple[Any, Any]]:
    """Return the caller's `saved_tensors_hooks`, outermost first."""
    found: list[tuple[Any, Any]] = []
    hooks = torch._C._autograd
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        found.insert(0, top)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in found:
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return found
