"""The checks of one node: facts of the machine, a product with known bits, and the folder."""

import fcntl
import hashlib
import platform
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from shardwise import __version__
from shardwise.checkpoint.files import Files, Lock
from shardwise.device import name_of
from shardwise.host import available_host_bytes, is_loopback, own_address, processor_name
from shardwise.preflight.meeting import Row
from shardwise.processes import boot_id

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_PREFIXES = "NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_"
_SIZE, _INNER = 1024, 256
_WINDOW_S = 0.1
_PACKAGE = Path(__file__).parent.parent
_SHARED_MEMORY = Path("/dev/shm")
_SIOCGIFADDR = 0x8915
_OUTSIDE = "192.0.2.1"  # RFC 5737: of no host, so it chooses the default route


def describe_node(device: torch.device, environment: Mapping[str, str]) -> Row:
    """Return the facts of this rank: machine, versions, memory and the address others reach."""
    address = own_address(environment.get("MASTER_ADDR"))
    if is_loopback(address):  # the first node may map its name to a loopback address
        address = own_address(_OUTSIDE)
    network = socket.gethostname()
    with suppress(OSError):  # containers of one host have different networks
        network = f"{boot_id()}/{Path('/proc/self/ns/net').stat().st_ino}"
    row = {
        "host": socket.gethostname(),
        "network": network,
        "address": address,
        "interface": interface_of(address),
        "name_address": _address_of_name(),
        "versions": {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "shardwise": f"{__version__}, code {digest_of_code()}",
        },
        "device": name_of(device),
        "processor": processor_name(),
        "host_free_bytes": available_host_bytes(),
        "settings": {
            name: value
            for name, value in sorted(environment.items())
            # An interface may have another name on each host.
            if name.startswith(_PREFIXES) and "IFNAME" not in name
        },
        "has_interface": "GLOO_SOCKET_IFNAME" in environment,
    }
    with suppress(OSError):
        row["shared_memory_bytes"] = Files().free_bytes(_SHARED_MEMORY)
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        row |= {"device_free_bytes": free, "device_bytes": total}
    return row


def digest_of_code() -> str:
    """Return eight digits that change with the package's source."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _address_of_name() -> str:
    """Return the address of this host's name, which gloo takes if no interface is set."""
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return ""


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address; or an empty text.

    **Source** netdevice(7), SIOCGIFADDR; the address is at byte 20 of the result.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode())
                result = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(result) == address:
                    return name
    return ""


def check_products(device: torch.device, multiply: Multiply = torch.matmul) -> Row:
    """Multiply matrices whose product is known, and others of which equal devices get equal bits.

    Factors of -1, 0 and 1 over 256 terms: every partial sum is at most 256, thus exact in fp32,
    TF32, fp16 and bf16, in any order. **State** one CPU thread from now on, in the calling thread:
    the bits of others depend on their number. **Cost** about half a second; all ranks work at once.
    """
    torch.set_num_threads(1)
    i, k = torch.arange(_SIZE)[:, None], torch.arange(_INNER)[None]
    left, right = (i + 2 * k + i * k) % 3 - 1, ((2 * i + k + i * i * k) % 3 - 1).T
    expected = left @ right  # of integers, on the host
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        product = multiply(left.to(device, dtype), right.to(device, dtype))
        num_wrong = int((product.cpu().double() != expected).sum())
        if num_wrong:
            wrong.append(f"{num_wrong:,} of {expected.numel():,} elements in {dtype}")
    generator = torch.Generator().manual_seed(0)
    size = _SIZE if device.type == "cpu" else 4 * _SIZE
    drawn = [torch.randn(size, size, generator=generator) for _ in range(2)]
    digests = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (matrix.to(device, dtype) for matrix in drawn)
        bits = multiply(a, b).float().cpu().numpy().tobytes()
        digests[str(dtype).removeprefix("torch.")] = hashlib.sha256(bits).hexdigest()
    a, b = (matrix.to(device) for matrix in drawn)
    count, began_s = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began_s) < _WINDOW_S:
        multiply(a, b)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        count += 1
    flops = 2.0 * size**3 * count / seconds
    return {"wrong": wrong, "digests": digests, "flops": flops}


class FolderProbe:
    """The folder of a run as one node sees it; ``token`` is new for each preflight."""

    def __init__(self, path: Path, token: str, files: Files | None = None) -> None:
        self._path = path
        self._token = token
        self._files = files or Files()
        self._lock: Lock | None = None
        self._is_new = False

    def write(self, rank: int) -> Row:
        """Write a small file of this rank durably; rank 0 takes a lock too."""
        began_s = time.perf_counter()
        try:
            self._is_new = not self._path.exists()
            self._files.make_folders(self._path)
            hidden = self._name(rank, ".tmp")
            with self._files.create(hidden) as writer:
                writer.write([memoryview(self._token.encode())])
                writer.sync()
            self._files.rename(hidden, self._name(rank))
            self._files.sync_folder(self._path)
            seconds = time.perf_counter() - began_s
            if rank == 0:
                with suppress(OSError):  # `look` finds that no lock holds
                    self._lock = self._files.lock(self._name("lock"))
            free = self._files.free_bytes(self._path)
        except OSError as error:
            return {"refused": f"{error.filename or self._path}: {error.strerror}"}
        return {"kind": file_system_of(self._path), "sync_s": seconds, "free_bytes": free}

    def look(self, rank: int, others: list[int], timeout_s: float) -> Row:
        """Return the ranks whose files this node does not see, and whether the lock excludes it."""
        until_s = time.monotonic() + timeout_s
        while (unseen := [r for r in others if not self._has(r)]) and time.monotonic() < until_s:
            time.sleep(0.1)
        is_excluded = True
        if rank and 0 not in unseen:
            try:
                lock = self._files.lock(self._name("lock"))
                is_excluded = lock is None
                if lock is not None:
                    lock.release()
            except OSError:  # a file system without locks
                is_excluded = False
        return {"unseen": unseen, "is_excluded": is_excluded}

    def clear(self, rank: int) -> Row:
        """Remove this rank's files, and a folder that this made if it is empty."""
        if self._lock is not None:
            self._lock.release()
        for path in (self._name(rank), self._name(rank, ".tmp"), self._name("lock")):
            with suppress(OSError):
                self._files.remove_file(path)
        if self._is_new:
            with suppress(OSError):
                self._files.remove_folder(self._path)
        return {}

    def _name(self, what: object, ending: str = "") -> Path:
        return self._path / f".preflight-{self._token}-{what}{ending}"

    def _has(self, rank: int) -> bool:
        try:
            with self._files.open(self._name(rank)) as reader:
                return reader.read(0, reader.size).decode() == self._token
        except FileNotFoundError:
            return False


def file_system_of(path: Path) -> str:
    """Return the kind of file system that a folder lies on, such as "ext4"; empty if unknown.

    **Source** proc(5), mountinfo: the mount point is the fifth field, the kind follows " - ".
    """
    best, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            if path.resolve().is_relative_to(point) and len(point) >= len(best):
                best, kind = point, after.split()[0]
    return kind
