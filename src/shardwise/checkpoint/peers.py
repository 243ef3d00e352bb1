"""Files of copies in the memory of other hosts, read over TCP.

Note [Files of other hosts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
One rank of each host runs a `_Server` for its folder. `PeerFiles` opens the files of some ranks
here and of others on a host that has them. A connection begins with a token that the ranks have
exchanged. As in gloo's own connections, nothing is encrypted.
"""

import hmac
import json
import re
import socket
import socketserver
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct

from shardwise.checkpoint.files import Files, Reader
from shardwise.checkpoint.manifest import is_ours
from shardwise.errors import DamagedCheckpoint
from shardwise.host import TcpServer

COPY = re.compile(r"step-([0-9]{8,12})|\.(tmp|old)-step-([0-9]{8,12})-[0-9a-f]{8}")
RANK = re.compile(r"rank([0-9]+)[.-]")
AT_ONCE_BYTES = 16 << 20
TOKEN_BYTES = 16
_SIZE = Struct("<q")  # of the file, or -1 if it cannot be read; the bytes asked for follow
_MAX_LINE = 1024
_TIMEOUT_S = 30.0  # a host that is silent for so long is gone


class PeerServer(TcpServer):
    """Sends bytes of the copies in one folder to ranks of other hosts, from a thread."""

    def __init__(self, folder: Path, host: str, token: bytes) -> None:
        self.folder, self.token = folder, token
        super().__init__(host, _Handler, "shardwise-peers")


class _Handler(socketserver.StreamRequestHandler):
    """Answers the questions of one rank, each a line of JSON."""

    timeout = _TIMEOUT_S
    server: PeerServer

    def handle(self) -> None:
        with suppress(OSError, ValueError, TypeError):  # the connection ends, the asker raises
            if not hmac.compare_digest(self.rfile.read(TOKEN_BYTES), self.server.token):
                return
            self.connection.settimeout(None)  # a load may read other files meanwhile
            while line := self.rfile.readline(_MAX_LINE):
                self._answer(*json.loads(line))

    def _answer(self, step: str, name: str, offset: int, num_bytes: int) -> None:
        is_copy = COPY.fullmatch(step) is not None
        if not (is_copy and is_ours(name) and 0 <= num_bytes <= AT_ONCE_BYTES):
            raise ValueError("no file of a checkpoint")
        try:
            with Files().open(self.server.folder / step / name) as reader:
                data, size = reader.read(offset, num_bytes), reader.size
        except (OSError, DamagedCheckpoint):
            data, size = b"", -1
        self.wfile.write(_SIZE.pack(size) + data)


class PeerReader(Reader):
    """A file on another host. **Raises** DamagedCheckpoint if the host does not answer."""

    def __init__(self, path: Path, address: tuple[str, int], token: bytes) -> None:
        super().__init__(path, -1, 0)
        self._address = address
        try:
            with socket.create_connection(address, _TIMEOUT_S) as connection:
                self._stream = connection.makefile("rwb")  # holds the connection
            self._stream.write(token)
            self.size = self._ask(0, memoryview(bytearray()))
        except OSError as error:
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
        with suppress(OSError):  # of bytes that could not be sent
            self._stream.close()

    def _ask(self, offset: int, out: memoryview) -> int:
        """Fill ``out``; return the size of the file."""
        asked = json.dumps([self._path.parent.name, self._path.name, offset, len(out)])
        self._stream.write(asked.encode() + b"\n")
        self._stream.flush()
        head = self._stream.read(_SIZE.size)
        if len(head) == _SIZE.size and _SIZE.unpack(head)[0] < 0:
            raise FileNotFoundError(0, "it has no such file any more")
        if len(head) < _SIZE.size or self._stream.readinto(out) < len(out):
            raise ConnectionError(0, "it has ended the connection")
        return int(_SIZE.unpack(head)[0])

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
        found = RANK.match(path.name)
        address = None if found is None else self._address_of.get(int(found[1]))
        return super().open(path) if address is None else PeerReader(path, address, self._token)
