"""What differs between devices; the only file that says ``torch.cuda``."""

import resource
from contextlib import suppress
from pathlib import Path

import torch


def local_device(local_rank: int) -> torch.device:
    """Return the device of a local rank: its CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def current_device(device_type: str) -> torch.device:
    """Return the device of this process for a mesh of ``device_type``."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak so far: the allocator's on CUDA, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory(device: torch.device) -> int:
    """Let `peak_memory_bytes` begin anew, where the system can; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(
        OSError
    ):  # Linux alone; proc(5), clear_refs: 5 resets the peak of resident memory
        Path("/proc/self/clear_refs").write_text("5")
    return memory_in_use_bytes(device)


def memory_in_use_bytes(device: torch.device) -> int:
    """Return what is in use now: the allocator's on CUDA, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no /proc outside Linux
        return peak_memory_bytes(device)
    return resident_pages * resource.getpagesize()


def fork_rng_devices(device: torch.device) -> list[torch.device]:
    """Return the devices whose generators ``torch.random.fork_rng`` has to save."""
    return [device] if device.type == "cuda" else []


def accelerator_generator(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's default generator, uint8 on the CPU; None for the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_accelerator_generator(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the device's default generator."""
    torch.cuda.set_rng_state(state, device)


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory for copies from ``device``: uint8 [num_bytes], touched, page-locked."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def wait_for_copies(devices: set[torch.device]) -> None:
    """Return when what was copied from these devices without waiting has arrived."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
