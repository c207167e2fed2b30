"""Segments of shared memory: files in a folder in a node's memory, written once by a producer and mapped by readers.

A file outlives the process that wrote it. A removed file stays readable for processes that have it mapped, so that bytes never
change under a view. `segment_pool` says when a file may be reused, and which segments are files on disk because memory is full:
the folder has a link to theirs. Each node has a segment server, which removes segments that are not needed any more and sends
others to other nodes; when it dies and is started again, nothing is lost.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import mmap
import os
import re
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from millstream.errors import StoreError
from millstream.store.connection import CoordinatorConnection
from millstream.store.wire import DISK, ReplyBody, Segment, StoreHello, UnlinkSegments

SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 256 << 20
MAX_MAPPED_BYTES = 256 << 20
"""Idle mappings that a process keeps for the next use."""
SEGMENT_NAME = re.compile(rf"[0-9a-f]+-[0-9]+(-{DISK})?")
MAX_REQUEST_BYTES = 1024
FETCH_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 30.0

STEPS = 8
"""Sizes of segments per doubling: at most an eighth of a segment is unused."""


def free_shared_memory() -> int | None:
    """Bytes; None: there is none that this process may use."""
    is_there = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return shutil.disk_usage(SHARED_MEMORY).free if is_there else None


def segment_folder(store: str, node: str) -> Path:
    """The folder of a node's segments: in memory, or on disk where a container has next to no shared memory."""
    name = f"millstream-{store}-{node}"
    free = free_shared_memory()
    if free is not None and ((SHARED_MEMORY / name).is_dir() or free >= MIN_FREE_BYTES):
        return SHARED_MEMORY / name
    return Path(tempfile.gettempdir()) / name


def segment_folders(store: str) -> list[Path]:
    """The folders of a store that are on this machine."""
    places = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    return [folder for place in places for folder in place.glob(f"millstream-{store}-*")]


def segment_path(folder: Path, name: str) -> Path:
    return folder / DISK / name if name.endswith(DISK) else folder / name


def link_disk(folder: Path, spill: Path) -> None:
    """Make the folder on disk that goes with a folder of segments, and the link to it."""
    target = spill / f"{folder.name}-{DISK}"
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / DISK).symlink_to(target, target_is_directory=True)
    except OSError as error:
        raise StoreError(
            f'rows cannot go to disk in "{spill}": {error.strerror}. Set store.spill_folder to a folder that exists on '
            "every node and can be written"
        ) from error


def remove_segments(folder: Path) -> None:
    """The folder, and that of its segments on disk."""
    with suppress(OSError):
        shutil.rmtree((folder / DISK).readlink(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_segment(folder: Path, segment: Segment, data: bytes) -> None:
    path = segment_path(folder, segment.name)
    try:
        path.write_bytes(data)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _no_space(error, segment, path.parent) from error


def size_class(nbytes: int) -> int:
    """The size of the segment for this many bytes."""
    step = max(mmap.PAGESIZE, (1 << max(nbytes - 1, 1).bit_length()) // (2 * STEPS))
    return (nbytes + step - 1) // step * step


class Segments:
    """The mappings of one process. `on_closed` is called with the name of the segment for every view that is closed."""

    def __init__(self, folder: Path, on_closed: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_closed = on_closed
        self._mapped: dict[str, mmap.mmap] = {}
        self._written: dict[str, mmap.mmap] = {}
        self._views: dict[str, int] = {}
        self._lock = threading.RLock()

    def writable(self, segment: Segment) -> memoryview:
        """The whole segment, created if it is new."""
        found = self._written.get(segment.name)
        if found is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = segment_path(self._folder, segment.name)
            try:
                number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(number, 0, segment.size)
                    found = mmap.mmap(number, segment.size)
                finally:
                    os.close(number)
            except OSError as error:
                raise _no_space(error, segment, path.parent) from error
            if not segment.is_on_disk:  # it is not reused, and a mapping would hold its place on the disk
                self._written[segment.name] = found
        return memoryview(found)

    def forget_written(self, name: str) -> None:
        self._written.pop(name, None)

    def view(self, segment: Segment, *, is_private: bool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Its bytes. Arrays made of it keep it alive; when the last of them is gone, the view is closed."""
        mapped = None if is_private else self._mapped.get(segment.name)
        if mapped is None:
            mapped = self._map(segment, is_private=is_private)
        array = np.frombuffer(mapped, np.uint8)
        with self._lock:
            self._views[segment.name] = self._views.get(segment.name, 0) + 1
        weakref.finalize(array, self._close, segment.name).atexit = False
        return array

    def _map(self, segment: Segment, *, is_private: bool) -> mmap.mmap:
        path = segment_path(self._folder, segment.name)
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"the segment {path} is gone: {error.strerror}") from error
        try:
            if is_private:
                return mmap.mmap(number, segment.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(number, segment.size, flags, mmap.PROT_READ)
            if not segment.is_on_disk:
                self._mapped[segment.name] = mapped
            return mapped
        finally:
            os.close(number)

    def _close(self, name: str) -> None:
        with self._lock:  # called on the thread that released the last array
            self._views[name] -= 1
            if not self._views[name]:
                del self._views[name]
        self._on_closed(name)

    def trim(self) -> None:
        """Unmap what has no view, the oldest first: mappings hold memory, even of files that were removed."""
        for cache in (self._mapped, self._written):
            held = sum(len(mapped) for mapped in cache.values())
            for name in list(cache):
                if held <= MAX_MAPPED_BYTES:
                    break
                if cache is self._written or name not in self._views:
                    held -= len(cache.pop(name))


def _no_space(error: OSError, segment: Segment, folder: Path) -> StoreError:
    found = f'no segment of {segment.size} bytes in "{folder.resolve()}": {error.strerror}'
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return StoreError(found)
    if segment.is_on_disk:
        return StoreError(f"{found}. Free space on that disk, or set store.spill_folder to a folder of another one")
    return StoreError(f"{found}. Set store.memory_gb to less than that memory: further rows go to disk")


# ---- the server of a node ---------------------------------------------------------------------------------------------


class SegmentServer:
    """Serves the segments of one folder. `spill`: where its segments on disk are. Raises `StoreError` if that cannot be."""

    def __init__(self, folder: Path, token: str, spill: str | None = None) -> None:
        self.folder = folder
        self._token = token
        if spill is not None:
            link_disk(folder, Path(spill))

    async def serve(self, host: str, port: int = 0) -> asyncio.Server:
        return await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection: `token name`, answered by the bytes of the segment."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await reader.readline()
            token, _, name = request.decode().strip().partition(" ")
            if not hmac.compare_digest(token.encode(), self._token.encode()) or not SEGMENT_NAME.fullmatch(name):
                return
            with segment_path(self.folder, name).open("rb") as file:
                await asyncio.get_running_loop().sendfile(writer.transport, file)
        except (OSError, ValueError):
            pass  # the segment or the client is gone: the connection closes without the bytes
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def unlink(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                segment_path(self.folder, name).unlink()

    def remove(self) -> None:
        remove_segments(self.folder)

    def names(self) -> list[str]:
        found: list[str] = []
        for folder in (self.folder, self.folder / DISK):
            with suppress(FileNotFoundError):
                found += [path.name for path in folder.iterdir() if path.name != DISK]
        return found


async def fetch_segment(
    address: tuple[str, int], token: str, name: str, nbytes: int
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The first bytes of a segment of another node, copied once, from the socket to where they stay."""
    loop, found, num = asyncio.get_running_loop(), np.empty(nbytes, np.uint8), 0
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as line:
                line.setblocking(False)
                await loop.sock_connect(line, address)
                await loop.sock_sendall(line, f"{token} {name}\n".encode())
                while num < nbytes and (count := await loop.sock_recv_into(line, found.data[num:])):
                    num += count
        if num < nbytes:
            raise ConnectionResetError(f"{num} of {nbytes} bytes came")
        return found
    except OSError as error:  # also a timeout
        raise StoreError(
            f"the segment {name} of the node at {address[0]}:{address[1]} cannot be read: {error}"
        ) from error


class SegmentServerAgent:
    """The segment server of a node that the coordinator is not on: connected to the coordinator, and controlled by it.

    Ends when the coordinator cannot be reached for `give_up_s`: the store is gone, and the folder is removed."""

    def __init__(
        self, server: SegmentServer, address: tuple[str, int], *, token: str, node: str, give_up_s: float
    ) -> None:
        self._server = server
        self._address = address
        self._token = token
        self._node = node
        self._give_up_s = give_up_s
        self.is_connected = threading.Event()

    async def run(self, host: str) -> None:
        async with await self._server.serve(host) as server:
            own: tuple[str, int] = server.sockets[0].getsockname()[:2]
            hello = StoreHello(server_name(self._node), self._token, self._node, own)
            connection = CoordinatorConnection(self._address, hello, self._give_up_s, self._on_order)
            with suppress(StoreError):
                await connection.connect()
                self.is_connected.set()
                await connection.lost()
        self._server.remove()

    def _on_order(self, order: ReplyBody) -> None:
        """A message of the coordinator that answers no request."""
        if isinstance(order, UnlinkSegments):
            self._server.unlink(order.names)


def server_name(node: str) -> str:
    """The client name of a node's segment server."""
    return f"segment server {node}"
