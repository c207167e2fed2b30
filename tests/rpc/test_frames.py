"""Frames: whole messages, in order, within the size bound."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.rpc.frames import FrameError, FrameProtocol, Frames, frame, read_frame

Messages = st.lists(st.one_of(st.integers(-(2**31), 2**31), st.text(max_size=50), st.binary(max_size=200)), max_size=8)


class OpenTransport(asyncio.Transport):
    def is_closing(self) -> bool:
        return False


@given(messages=Messages, piece=st.integers(1, 64))
def test_every_reader_returns_the_messages_that_were_sent_however_the_stream_is_cut(
    messages: list[Any], piece: int
) -> None:
    stream = b"".join(map(frame, messages))
    pieces = [stream[start : start + piece] for start in range(0, len(stream), piece)]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, found = Frames(ours), []
        for data in pieces:
            theirs.sendall(data)
            found += reader.receive(block=False) or []
        theirs.close()
        assert reader.receive(block=True) is None
    assert [msgspec.msgpack.decode(one) for one in found] == messages

    seen: list[Any] = []
    protocol = FrameProtocol(lambda view: seen.append(msgspec.msgpack.decode(view)), lambda: None)
    protocol.transport = OpenTransport()
    for data in pieces:
        protocol.data_received(data)
    assert seen == messages


def test_a_frame_above_the_bound_is_refused_before_its_body_is_read() -> None:
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data((1001).to_bytes(4, "little"))
        return await read_frame(reader, 1000)

    with pytest.raises(FrameError, match="1001 bytes, expected at most 1000"):
        asyncio.run(read())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((1001).to_bytes(4, "little"))
        with pytest.raises(FrameError, match="1001 bytes, expected at most 1000"):
            Frames(ours, 1000).receive(block=True)


def test_messages_of_one_turn_of_the_event_loop_are_written_together_and_in_order() -> None:
    written: list[bytes] = []

    class Transport(OpenTransport):
        def write(self, data: bytes) -> None:
            written.append(data)

    async def send() -> None:
        protocol = FrameProtocol(lambda view: None, lambda: None)
        protocol.transport = Transport()
        for number in range(5):
            protocol.send(number)
        assert not written
        await asyncio.sleep(0)
        protocol.send(5)
        protocol.flush()
        await asyncio.sleep(0)

    asyncio.run(send())
    assert len(written) == 2
    assert b"".join(written) == b"".join(frame(number) for number in range(6))
