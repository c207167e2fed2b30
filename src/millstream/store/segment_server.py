"""A node's segment server: removes segments that are not needed any more, and sends others to other nodes.

The bytes are in files of shared memory, not in this process: when it dies and is started again, nothing is lost.
"""

from __future__ import annotations

import asyncio
import hmac
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from millstream.errors import StoreError
from millstream.retry import BackOff, Retry
from millstream.rpc.frames import FrameProtocol
from millstream.store.segments import SEGMENT_NAME, unlink_segments
from millstream.store.wire import StoreHello, StoreReply, StoreRequest, UnlinkSegments, Welcome

MAX_REQUEST_BYTES = 1024
AGENT_RECONNECT = BackOff(first_s=0.05, longest_s=1.0)
FETCH_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 30.0


class SegmentServer:
    """Serves the segments of one folder."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self._token = token

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
            with (self.folder / name).open("rb") as file:
                await asyncio.get_running_loop().sendfile(writer.transport, file)
        except (OSError, ValueError):
            pass  # the segment or the client is gone: the connection closes without the bytes
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def unlink(self, names: list[str]) -> None:
        unlink_segments(self.folder, names)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [path.name for path in self.folder.iterdir()]
        return []


async def fetch_segment(address: tuple[str, int], token: str, name: str, nbytes: int) -> bytearray:
    """The first bytes of a segment of another node."""
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            try:
                writer.write(f"{token} {name}\n".encode())
                return bytearray(await reader.readexactly(nbytes))
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:  # a timeout is an OSError
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
        loop = asyncio.get_running_loop()
        async with await self._server.serve(host) as server:
            own: tuple[str, int] = server.sockets[0].getsockname()[:2]
            retry = Retry(AGENT_RECONNECT, give_up_s=self._give_up_s)
            wait_s: float | None = 0.0
            while wait_s is not None:
                await asyncio.sleep(wait_s)
                with suppress(OSError):
                    await self._listen(own)
                    retry = Retry(AGENT_RECONNECT, give_up_s=self._give_up_s)
                wait_s = retry.failed(loop.time())
        self._server.remove()

    async def _listen(self, own: tuple[str, int]) -> None:
        """Until the connection is lost."""
        loop, decoder = asyncio.get_running_loop(), msgspec.msgpack.Decoder(StoreReply)
        is_over = loop.create_future()

        def on_message(message: memoryview) -> None:
            reply = decoder.decode(message)
            if isinstance(reply.body, UnlinkSegments):
                self._server.unlink(reply.body.names)
            elif isinstance(reply.body, Welcome):
                self.is_connected.set()

        connection = FrameProtocol(on_message, lambda: is_over.set_result(None))
        await loop.create_connection(lambda: connection, *self._address)
        connection.send(StoreRequest(0, [], StoreHello(server_name(self._node), self._token, self._node, own)))
        await is_over


def server_name(node: str) -> str:
    """The client name of a node's segment server."""
    return f"segment server {node}"
