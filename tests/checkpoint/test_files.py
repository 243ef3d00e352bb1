"""The real files: only regular files, never over an existing one, every error with its name."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from shardwise.checkpoint import files as files_module
from shardwise.checkpoint.files import Files, read_text
from shardwise.checkpoint.folder import remove_tree
from shardwise.errors import CheckpointError, DamagedCheckpoint

FILES = Files()


def put(path, *parts):
    with FILES.create(path) as writer:
        writer.write([memoryview(part) for part in parts])


def get(path):
    with FILES.open(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    return bytes(data)


def test_buffers_are_written_whole_and_in_order(tmp_path):
    parts = [
        bytes([i % 251]) * (i % 7) for i in range(3000)
    ]  # more than one call takes, some empty
    with FILES.create(tmp_path / "a") as writer:
        writer.write([memoryview(part) for part in parts[:2500]])
        writer.write([])
        writer.write([memoryview(part) for part in parts[2500:]])
        writer.sync()
    assert get(tmp_path / "a") == b"".join(parts)


def test_buffers_of_other_types_are_written_as_bytes(tmp_path):
    words = memoryview(bytearray(range(16))).cast("I")
    grid = memoryview(bytearray(range(16))).cast("B", (4, 4))
    with FILES.create(tmp_path / "a") as writer:
        writer.write([words, memoryview(b""), grid])
    assert get(tmp_path / "a") == bytes(range(16)) * 2
    back = memoryview(bytearray(16)).cast("I")
    with FILES.open(tmp_path / "a") as reader:
        reader.read_into(16, back)
    assert back.tobytes() == bytes(range(16))


@pytest.mark.parametrize("step", [1, 3, 5, 64])
def test_short_writes_and_reads_are_continued(tmp_path, monkeypatch, step):
    write, read = os.writev, os.preadv

    def some(fd, views):
        return write(fd, [memoryview(b"".join(views))[:step]])

    monkeypatch.setattr(os, "writev", some)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:step]], at))
    put(tmp_path / "a", b"abcd", b"", b"e", b"fghijklmnop", b"q")
    assert get(tmp_path / "a") == b"abcdefghijklmnopq"


def test_one_call_takes_a_bounded_number_of_bytes_and_buffers(tmp_path, monkeypatch):
    calls = []
    write = os.writev

    def watch(fd, views):
        calls.append((len(views), sum(map(len, views))))
        return write(fd, views)

    monkeypatch.setattr(os, "writev", watch)
    monkeypatch.setattr(files_module, "_CALL_BYTES", 10)
    monkeypatch.setattr(files_module, "_CALL_BUFFERS", 3)
    put(tmp_path / "a", b"x" * 25, *[b"y"] * 7)
    assert calls == [(1, 10), (1, 10), (3, 7), (3, 3), (2, 2)]
    assert get(tmp_path / "a") == b"x" * 25 + b"y" * 7


def test_the_disk_is_set_to_work_on_all_bytes_as_they_are_written(tmp_path, monkeypatch):
    told = []
    function = lambda fd, lo, n, flags: told.append((lo, n))  # noqa: E731
    monkeypatch.setattr(files_module, "_sync_file_range", lambda: function)
    monkeypatch.setattr(files_module, "_CALL_BYTES", 10)
    put(tmp_path / "a", b"x" * 25, b"", b"y" * 3)
    assert told == [(0, 10), (10, 10), (20, 8)]


@pytest.mark.parametrize("function", [None, lambda *_: -1], ids=["libc lacks it", "it fails"])
def test_a_kernel_that_cannot_write_ahead_is_no_error(tmp_path, monkeypatch, function):
    monkeypatch.setattr(files_module, "_sync_file_range", lambda: function)
    put(tmp_path / "a", b"abc")
    assert get(tmp_path / "a") == b"abc"


def test_an_existing_name_is_never_written_to(tmp_path):
    put(tmp_path / "file", b"old")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("file", "link", "folder"):
        with pytest.raises(FileExistsError) as caught:
            FILES.create(tmp_path / name)
        assert caught.value.filename in (tmp_path / name, str(tmp_path / name))
    assert get(tmp_path / "file") == b"old"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("call", ["open", "lock"])
def test_only_a_regular_file_is_opened_and_the_error_says_what_it_was(tmp_path, call):
    put(tmp_path / "file", b"data")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))  # its path may have 108 bytes at most
        for name, kind in {
            "link": "symbolic link",
            "folder": "folder",
            "pipe": "pipe",
            "socket": "socket",
            "/dev/null": "device",
        }.items():
            with pytest.raises(CheckpointError, match=f"{name} should .* is a {kind};"):
                getattr(FILES, call)(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        FILES.open(tmp_path / "missing")
    os.link(tmp_path / "file", tmp_path / "lock")  # who holds a lock writes into it
    if call == "lock":
        with pytest.raises(CheckpointError, match="the same file has 2 names"):
            FILES.lock(tmp_path / "lock")
    assert get(tmp_path / "file") == b"data"


def test_a_refused_open_leaves_no_descriptor_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    holder = FILES.lock(tmp_path / "lock")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(CheckpointError):
            FILES.open(tmp_path / "pipe")
        assert FILES.lock(tmp_path / "lock") is None
        FILES.sync_folder(tmp_path)
        with FILES.open(tmp_path / "lock") as reader, pytest.raises(DamagedCheckpoint):
            reader.read_into(0, memoryview(bytearray(1)))
    assert len(os.listdir("/proc/self/fd")) == before
    holder.release()


def test_a_file_that_is_too_short_is_named_with_both_sizes(tmp_path):
    put(tmp_path / "a", b"12345")
    with FILES.open(tmp_path / "a") as reader:
        reader.read_into(5, memoryview(b"").cast("B"))
        with pytest.raises(DamagedCheckpoint, match=r"a: expected at least 9 bytes, .* has 5:"):
            reader.read_into(2, memoryview(bytearray(7)))


@pytest.mark.parametrize("name", ["fsync", "preadv", "writev", "close", "flock"])
def test_every_error_of_an_open_file_carries_errno_and_file_name(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "a"
    writer = FILES.create(path)
    writer.write([memoryview(b"data")])
    calls = {
        "fsync": writer.sync,
        "writev": lambda: writer.write([memoryview(b"data")]),
        "preadv": lambda: get(path),
        "flock": lambda: FILES.lock(path),
        "close": writer.close,
    }
    with monkeypatch.context() as patch:
        patch.setattr(fcntl if name == "flock" else os, name, fail)
        with pytest.raises(OSError) as caught:
            calls[name]()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    writer.close()


def test_a_failed_sync_of_a_folder_names_it_unless_the_file_system_has_none(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EIO
    with pytest.raises(OSError) as caught:
        FILES.sync_folder(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path))
    number = errno.EINVAL
    FILES.sync_folder(tmp_path)


@pytest.fixture(params=["kernel", "kernel refuses", "libc lacks it"])
def rename_support(request, monkeypatch):
    """The kernel's renameat2, one that knows no flags (as on some file systems), or none."""
    import ctypes

    def refuse(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    if request.param != "kernel":
        function = refuse if request.param == "kernel refuses" else None
        monkeypatch.setattr(files_module, "_renameat2", lambda: function)
    return request.param


def test_rename_moves_and_refuses_an_existing_target(tmp_path, rename_support):
    a, b = tmp_path / "a\u00e9", tmp_path / "b"
    a.mkdir()
    put(a / "f", b"1")
    for make in (lambda: b.mkdir(), lambda: put(b, b"2"), lambda: b.symlink_to("nowhere")):
        make()
        with pytest.raises(FileExistsError) as caught:
            FILES.rename(a, b)
        assert (caught.value.filename, caught.value.filename2) == (str(a), str(b))
        b.rmdir() if b.is_dir() else b.unlink()
    FILES.rename(a, b)
    assert not a.exists() and get(b / "f") == b"1"
    with pytest.raises(FileNotFoundError) as caught2:
        FILES.rename(a, tmp_path / "c")
    assert str(caught2.value.filename) == str(a)


def test_exchange_swaps_two_folders_or_says_that_it_cannot(tmp_path, rename_support):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
        put(folder / "f", folder.name.encode())
    if rename_support == "kernel":
        FILES.exchange(a, b)
        assert (get(a / "f"), get(b / "f")) == (b"b", b"a")
        with pytest.raises(FileNotFoundError):
            FILES.exchange(a, tmp_path / "missing")
    else:
        with pytest.raises(OSError) as caught:
            FILES.exchange(a, b)
        assert caught.value.errno in (errno.EINVAL, errno.ENOSYS)
        assert (get(a / "f"), get(b / "f")) == (b"a", b"b")


def test_a_listing_is_sorted_and_follows_no_link(tmp_path):
    put(tmp_path / "b", b"12")
    (tmp_path / "a").mkdir()
    (tmp_path / "c").symlink_to("b")
    os.mkfifo(tmp_path / "d")
    found = FILES.list(tmp_path)
    assert [(e.name, e.kind, e.size) for e in found] == [
        ("a", "folder", 0),
        ("b", "file", 2),
        ("c", "other", 0),
        ("d", "other", 0),
    ]


def test_folders_are_made_with_those_above_and_all_names_synced(tmp_path, monkeypatch):
    synced = []
    sync = Files.sync_folder

    def watch(files, path):
        synced.append(path.name)
        sync(files, path)

    monkeypatch.setattr(Files, "sync_folder", watch)
    FILES.make_folders(tmp_path / "a" / "b" / "c")
    assert sorted(synced) == sorted([tmp_path.name, "a", "b"])
    synced.clear()
    FILES.make_folders(tmp_path / "a" / "b" / "c")
    assert synced == ["b"]
    with pytest.raises(FileExistsError):
        FILES.make_folder(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        FILES.make_folder(tmp_path / "x" / "y")


def test_a_lock_has_one_holder_whichever_process_asks(tmp_path):
    path = tmp_path / "lock"
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from shardwise.checkpoint.files import Files
print(Files().lock(Path({str(path)!r})) is not None)
"""

    def other_process_gets_it():
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return out.stdout.split() == [b"True"]

    lock = FILES.lock(path)
    lock.write("a process with a long name")
    lock.write("me")
    assert read_text(FILES, path, 100) == "me"
    assert FILES.lock(path) is None and not other_process_gets_it()
    lock.release()
    lock.release()
    assert other_process_gets_it()
    assert path.exists()


def test_a_lock_is_free_again_when_its_holder_let_go_though_a_fork_lives(tmp_path):
    lock = FILES.lock(tmp_path / "lock")
    # What a forked data loader would hold: a copy of the descriptor of the same open file.
    open_here = [int(fd) for fd in os.listdir("/proc/self/fd") if leads_to(fd, tmp_path)]
    assert len(open_here) == 1
    copy = os.dup(open_here[0])
    lock.release()
    again = FILES.lock(tmp_path / "lock")
    again.release()
    os.close(copy)


def leads_to(fd, folder):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
    except FileNotFoundError:
        return False


def test_a_tree_of_files_and_links_is_removed_and_nothing_outside_it(tmp_path):
    put(tmp_path / "outside", b"1")
    tree = tmp_path / "tree"
    remove_tree(FILES, tree)  # nothing there
    tree.mkdir()
    put(tree / "a", b"2")
    (tree / "link").symlink_to(tmp_path)
    remove_tree(FILES, tree)
    assert [e.name for e in FILES.list(tmp_path)] == ["outside"]


def test_a_tree_that_is_a_link_or_holds_folders_is_left_whole(tmp_path):
    real = tmp_path / "real"
    (real / "folder").mkdir(parents=True)
    put(real / "a", b"1")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CheckpointError, match="link was to be removed but is no folder"):
        remove_tree(FILES, tmp_path / "link")
    with pytest.raises(CheckpointError, match="holds the folder 'folder'"):
        remove_tree(FILES, real)
    assert [e.name for e in FILES.list(real)] == ["a", "folder"]


def test_text_that_is_too_long_or_no_utf8_is_refused(tmp_path):
    put(tmp_path / "a", "h\u00e9".encode())
    put(tmp_path / "b", b"\xff")
    assert read_text(FILES, tmp_path / "a", 3) == "h\u00e9"
    with pytest.raises(DamagedCheckpoint, match="3 bytes, at most 2"):
        read_text(FILES, tmp_path / "a", 2)
    with pytest.raises(DamagedCheckpoint, match="should be UTF-8"):
        read_text(FILES, tmp_path / "b", 2)


def test_free_bytes_are_those_of_the_file_system(tmp_path):
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize
    assert 0 < FILES.free_bytes(tmp_path) <= total
