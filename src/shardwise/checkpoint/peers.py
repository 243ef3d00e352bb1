"""Files in the memory of other hosts, read over TCP by the ranks that need bytes of them.

One rank of each host runs a `Server` for its folder. `PeerFiles` opens the files of some ranks here
and of others on a host that has them. A connection begins with a token that the ranks have
exchanged. As in gloo's own connections, nothing is encrypted.
"""

import hmac
import json
import re
import socket
import socketserver
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct

from shardwise.checkpoint.files import Files, Reader
from shardwise.checkpoint.manifest import is_ours
from shardwise.checkpoint.trash import is_step, is_temporary
from shardwise.errors import DamagedCheckpoint

TOKEN_BYTES = 16
_SIZE = Struct("<q")  # of the file, or -1 if it cannot be read; the bytes asked for follow
_MAX_LINE = 1024
AT_ONCE_BYTES = 16 << 20
_TIMEOUT_S = 30.0  # a host that is silent for so long is gone
_RANK = re.compile(r"rank([0-9]+)[.-]")


class Server:
    """Sends bytes of the checkpoints in one folder to ranks of other hosts, from a thread."""

    def __init__(self, folder: Path, host: str, token: bytes) -> None:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        how = {"address_family": family, "daemon_threads": True, "request_queue_size": 128}
        kind = type("Listener", (socketserver.ThreadingTCPServer,), how)
        self._server: socketserver.ThreadingTCPServer = kind((host, 0), _handler(folder, token))
        run = self._server.serve_forever
        threading.Thread(target=run, name="shardwise-peers", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _handler(folder: Path, token: bytes) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        timeout = _TIMEOUT_S

        def handle(self) -> None:
            with suppress(OSError, ValueError, TypeError):  # the connection ends, the asker raises
                if not hmac.compare_digest(self.rfile.read(TOKEN_BYTES), token):
                    return
                self.connection.settimeout(None)  # a load may read other files meanwhile
                while line := self.rfile.readline(_MAX_LINE):
                    self._answer(*json.loads(line))

        def _answer(self, step: str, name: str, offset: int, num_bytes: int) -> None:
            is_copy = is_step(step) or is_temporary(step)
            if not (is_copy and is_ours(name) and 0 <= num_bytes <= AT_ONCE_BYTES):
                raise ValueError("no file of a checkpoint")
            try:
                with Files().open(folder / step / name) as reader:
                    data, size = reader.read(offset, num_bytes), reader.size
            except (OSError, DamagedCheckpoint):
                data, size = b"", -1
            self.wfile.write(_SIZE.pack(size) + data)

    return Handler


class PeerReader(Reader):
    """A file on another host. **Raises** DamagedCheckpoint if the host does not answer."""

    def __init__(self, path: Path, address: tuple[str, int], token: bytes) -> None:
        super().__init__(path, -1, 0)
        self._address = address
        try:
            self._socket = socket.create_connection(address, _TIMEOUT_S)
        except OSError as error:
            raise self._unanswered(error) from error
        try:
            self._socket.sendall(token)
            self.size = self._ask(0, memoryview(b""))
        except OSError as error:
            self._socket.close()
            raise self._unanswered(error) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from ``offset``."""
        rest = buffer.cast("B") if buffer.nbytes else buffer
        try:
            while rest.nbytes:
                part, rest = rest[:AT_ONCE_BYTES], rest[AT_ONCE_BYTES:]
                self._ask(offset, part)
                offset += len(part)
        except OSError as error:
            raise self._unanswered(error) from error

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _ask(self, offset: int, out: memoryview) -> int:
        """Fill ``out``; return the size of the file."""
        asked = json.dumps([self._path.parent.name, self._path.name, offset, len(out)])
        self._socket.sendall(asked.encode() + b"\n")
        head = bytearray(_SIZE.size)
        self._receive(memoryview(head))
        (size,) = _SIZE.unpack(head)
        if size < 0:
            raise FileNotFoundError(0, "it has no such file any more")
        self._receive(out)
        return int(size)

    def _receive(self, out: memoryview) -> None:
        while len(out):
            count = self._socket.recv_into(out)
            if not count:
                raise ConnectionError(0, "it has ended the connection")
            out = out[count:]

    def _unanswered(self, error: OSError) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self._path}: it was to be read from the memory of {self._address[0]}: "
            f"{error.strerror or error}"
        )


class PeerFiles(Files):
    """The files of checkpoints that lie in the memory of several hosts.

    ``address_of`` has the server of a host for each saved rank whose files are not here.
    """

    def __init__(self, address_of: Mapping[int, tuple[str, int]], token: bytes) -> None:
        self._address_of, self._token = address_of, token

    def open(self, path: Path) -> Reader:
        """Open a file here, or on the host that has it."""
        found = _RANK.match(path.name)
        address = None if found is None else self._address_of.get(int(found[1]))
        return super().open(path) if address is None else PeerReader(path, address, self._token)


def own_address(seen_from: str | None) -> str:
    """Return the address by which a host is reached from ``seen_from``, where the store is."""
    with suppress(OSError):
        found = socket.getaddrinfo(seen_from or socket.gethostname(), 9, type=socket.SOCK_DGRAM)
        family, _, _, _, place = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it chooses the interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"
