"""What a node does for its segments: removes those that are not needed any more, and sends the others to other nodes.

The bytes are in files of shared memory, not in this process: when it dies and is started again, nothing is lost.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from millstream.errors import StoreError
from millstream.store.segments import SEGMENT_NAME, unlink
from millstream.store.wire import Frames, Hello, Reply, Request, Unlink, Welcome

MAX_REQUEST_BYTES = 1024
RETRY_S = 0.05
FETCH_S = 300.0
ASK_S = 30.0


class Holder:
    """Serves the segments of one folder."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self._token = token

    async def serve(self, host: str, port: int = 0) -> asyncio.Server:
        return await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection: `token name`, answered by the size and the bytes."""
        try:
            async with asyncio.timeout(ASK_S):
                asked = await reader.readline()
            token, _, name = asked.decode().strip().partition(" ")
            if not hmac.compare_digest(token.encode(), self._token.encode()) or not SEGMENT_NAME.fullmatch(name):
                return
            with (self.folder / name).open("rb") as file:
                writer.write(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
                await writer.drain()
                await asyncio.get_running_loop().sendfile(writer.transport, file)
        except (OSError, ValueError):
            pass  # it is gone, or whoever asked is: the connection closes without the bytes
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def unlink(self, names: list[str]) -> None:
        unlink(self.folder, names)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [path.name for path in self.folder.iterdir()]
        return []


async def fetch(address: tuple[str, int], token: str, name: str, nbytes: int) -> bytearray:
    """The first bytes of a segment of another node."""
    try:
        async with asyncio.timeout(FETCH_S):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            try:
                writer.write(f"{token} {name}\n".encode())
                await reader.readexactly(8)
                return bytearray(await reader.readexactly(nbytes))
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:  # a timeout is an OSError
        raise StoreError(
            f"the segment {name} of the node at {address[0]}:{address[1]} cannot be read: {error}"
        ) from error


class HolderAgent:
    """The holder of a node that the coordinator is not on: stays in touch with it, and does what it says.

    Ends when the coordinator has been away for `give_up_s`: the store is gone, and so is the folder."""

    def __init__(self, holder: Holder, address: tuple[str, int], *, token: str, node: str, give_up_s: float) -> None:
        self._holder = holder
        self._address = address
        self._token = token
        self._node = node
        self._give_up_s = give_up_s
        self.is_connected = threading.Event()

    async def run(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        async with await self._holder.serve(host) as server:
            own: tuple[str, int] = server.sockets[0].getsockname()[:2]
            seen = loop.time()
            while loop.time() - seen < self._give_up_s:
                with suppress(OSError):
                    await self._talk(own)
                    seen = loop.time()
                await asyncio.sleep(RETRY_S)
        self._holder.remove()

    async def _talk(self, own: tuple[str, int]) -> None:
        """Until the line breaks."""
        loop, decoder = asyncio.get_running_loop(), msgspec.msgpack.Decoder(Reply)
        is_over = loop.create_future()

        def on_message(message: memoryview) -> None:
            reply = decoder.decode(message)
            if isinstance(reply.body, Unlink):
                self._holder.unlink(reply.body.names)
            elif isinstance(reply.body, Welcome):
                self.is_connected.set()

        line = Frames(on_message, lambda: is_over.set_result(None))
        await loop.create_connection(lambda: line, *self._address)
        line.send(Request(0, [], Hello(f"holder {self._node}", self._token, self._node, own)))
        await is_over
