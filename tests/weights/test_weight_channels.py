"""Weights from one process to others: real processes, real deaths."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from millstream.decoding import decode_msgpack
from millstream.errors import WeightsError, WeightsSuperseded, WeightsUnreachable
from millstream.store.segments import segment_folder
from millstream.weights import TransferWay
from millstream.weights.remote import RemoteChannel
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.broadcast import BroadcastOffer
from millstream.weights.transfer.cached_ref import CachedRef
from millstream.weights.transfer.device_memory import DeviceBuffer, IpcHandle
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.remote_weights import RemoteWeights
from millstream.weights.transfer.slots import HEADER_BYTES, OWNER_SUFFIX, Slot
from support.logs import own_messages
from support.weight_peers import Peer, forks
from support.weight_worker import fingerprint, weights

BUCKET = 1 << 14
"""Small, so that there are several."""
MEGABYTE = 1 << 20
NewPublisher = Callable[..., WeightsPublisher]


@pytest.fixture(scope="module")
def new_peer() -> Iterator[Callable[[], Peer]]:
    with forks() as new:
        yield new


@pytest.fixture
def peers(new_peer: Callable[[], Peer]) -> Iterator[Callable[[], Peer]]:
    """A fresh process for each call. They are killed when the test is over."""
    used: list[Peer] = []

    def peer() -> Peer:
        used.append(new_peer())
        return used[-1]

    yield peer
    for one in used:
        one.kill()


@pytest.fixture(scope="module")
def reader(new_peer: Callable[[], Peer]) -> Iterator[Peer]:
    """One that all tests share which do it no harm."""
    peer = new_peer()
    yield peer
    peer.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=segment_folder("test", "a").parent) as name:
        yield Path(name) / "slots"


@pytest.fixture
def new_publisher(folder: Path) -> Iterator[NewPublisher]:
    publishers: list[WeightsPublisher] = []

    def new(ways: Sequence[TransferWay] = ("shared",), **options: Any) -> WeightsPublisher:
        publishers.append(WeightsPublisher(folder, node="a", ways=ways, **{"bucket_bytes": BUCKET, **options}))
        return publishers[-1]

    yield new
    for publisher in publishers:
        publisher.close()


def offer_of(ref: WeightsRef) -> BroadcastOffer:
    return decode_msgpack(ref.offers["broadcast"], BroadcastOffer)


def with_offer(ref: WeightsRef, offer: BroadcastOffer) -> WeightsRef:
    return structs.replace(ref, offers={**ref.offers, "broadcast": msgspec.msgpack.encode(offer)})


def expected(version: int, num_bytes: int = 1 << 16) -> str:
    return fingerprint(dict(weights(version, num_bytes)))


@pytest.mark.parametrize(
    ("ways", "node", "way"),
    [
        (["shared"], "a", "shared"),
        (["broadcast"], "b", "broadcast"),
        (["files"], "b", "files"),
        (["shared", "broadcast", "files"], "a", "shared"),
        (["shared", "broadcast", "files"], "b", "broadcast"),
        (["files", "broadcast", "shared"], "a", "files"),
    ],
)
def test_another_process_gets_every_byte_by_the_first_way_that_leads_to_it(
    ways: list[TransferWay], node: str, way: TransferWay, new_publisher: NewPublisher, reader: Peer, tmp_path: Path
) -> None:
    publisher = new_publisher(ways, files=tmp_path)
    for version in (3, 4):
        found = reader.take(publisher.put(version, weights(version)), node=node)
        assert found["way"] == way and found["version"] == version
        assert found["fingerprint"] == expected(version)
        reader.ask("release")


def test_a_reference_is_small_and_does_not_show_its_token(new_publisher: NewPublisher) -> None:
    ref = new_publisher(["shared", "broadcast"]).put(1, weights(1))
    assert len(msgspec.msgpack.encode(ref)) < 1000
    token = offer_of(ref).token
    assert len(token) == 32
    assert token not in repr(ref) and token not in repr(RemoteWeights(ref, WeightsFetcher("a")))


def test_a_flipped_bit_is_found_and_its_bucket_named(new_publisher: NewPublisher) -> None:
    ref = new_publisher().put(1, weights(1))
    with Path(ref.path).open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * BUCKET + 77)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0b1000]))
    with pytest.raises(WeightsError, match=r"bucket 2 of version 1 \(embedding\)"):
        WeightsFetcher("a").take(ref)


def test_swapped_buckets_are_found(new_publisher: NewPublisher) -> None:
    ref = new_publisher().put(1, weights(1))
    with Path(ref.path).open("r+b") as file:
        file.seek(HEADER_BYTES)
        first, second = file.read(BUCKET), file.read(BUCKET)
        file.seek(HEADER_BYTES)
        file.write(second + first)
    with pytest.raises(WeightsError, match="bucket 0 of version 1"):
        WeightsFetcher("a").take(ref)


def test_a_flipped_bit_is_found_at_the_other_end_of_a_broadcast(new_publisher: NewPublisher, reader: Peer) -> None:
    ref = new_publisher(["broadcast"]).put(1, weights(1))
    with Path(ref.path).open("r+b") as file:
        file.seek(HEADER_BYTES + 4 * BUCKET + 70)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    found = reader.take(ref, node="b")
    assert found["error"] == "WeightsError" and "bucket 4 of version 1 (half to flags)" in found["says"]


@pytest.mark.parametrize("way", ["shared", "broadcast"])
def test_a_reference_that_was_superseded_says_so(way: TransferWay, new_publisher: NewPublisher) -> None:
    publisher = new_publisher([way])
    first = publisher.put(1, weights(1))
    for version in (2, 3):
        publisher.put(version, weights(version))
    with pytest.raises(WeightsSuperseded, match="superseded by"):
        WeightsFetcher("a").take(first)


def test_the_newest_but_one_can_still_be_taken(new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    first = publisher.put(1, weights(1))
    publisher.put(2, weights(2))
    with WeightsFetcher("a").take(first) as taken:
        assert fingerprint(taken.weights) == expected(1)


def test_what_was_taken_stays_while_others_are_put(new_publisher: NewPublisher, reader: Peer) -> None:
    publisher = new_publisher()
    found = reader.take(publisher.put(1, weights(1)))
    newest = [publisher.put(version, weights(version)) for version in (2, 3, 4)][-1]
    assert reader.ask("look")["fingerprint"] == found["fingerprint"] == expected(1)
    reader.ask("release")
    assert reader.take(newest)["fingerprint"] == expected(4)
    reader.ask("release")


def test_no_slot_is_fetched_from_a_reader_and_a_put_that_finds_none_says_so(
    new_publisher: NewPublisher, folder: Path
) -> None:
    publisher, fetcher = new_publisher(), WeightsFetcher("a")
    held = [fetcher.take(publisher.put(version, weights(version))) for version in range(4)]
    with pytest.raises(WeightsError, match="all 4 slots"):
        publisher.put(4, weights(4))
    for version, taken in enumerate(held):
        assert fingerprint(taken.weights) == expected(version)
    held[1].release()
    with fetcher.take(publisher.put(5, weights(5))) as taken:
        assert fingerprint(taken.weights) == expected(5)
    assert len(list(folder.glob("*-*"))) == 4


def test_a_reader_that_is_killed_frees_its_slot(
    new_publisher: NewPublisher, peers: Callable[[], Peer], folder: Path
) -> None:
    publisher, peer, fetcher = new_publisher(), peers(), WeightsFetcher("a")
    peer.take(first := publisher.put(0, weights(0)))
    held = [fetcher.take(publisher.put(version, weights(version))) for version in range(1, 4)]
    with pytest.raises(WeightsError, match="all 4 slots"):
        publisher.put(4, weights(4))
    peer.kill()
    assert publisher.put(4, weights(4)).path == first.path
    for taken in held:
        taken.release()


def test_a_slot_is_free_when_the_last_tensor_of_it_is_gone(new_publisher: NewPublisher) -> None:
    publisher = new_publisher()
    first = publisher.put(1, weights(1))
    tensor = WeightsFetcher("a").take(first).weights["half"]  # nobody has what it was taken with
    kept = tensor.clone()
    assert first.path not in [publisher.put(version, weights(version)).path for version in (2, 3, 4)]
    assert torch.equal(tensor, kept)
    del tensor
    assert first.path in [publisher.put(version, weights(version)).path for version in (5, 6)]


def test_a_process_that_writes_into_fetched_weights_changes_nothing_for_others(new_publisher: NewPublisher) -> None:
    ref = new_publisher().put(1, weights(1))
    with WeightsFetcher("a").take(ref) as mine, WeightsFetcher("a").take(ref) as theirs:
        mine.weights["embedding"].zero_()
        assert fingerprint(theirs.weights) == expected(1)


def test_a_version_that_is_larger_or_smaller_than_the_one_before_arrives(new_publisher: NewPublisher) -> None:
    publisher, fetcher = new_publisher(), WeightsFetcher("a")
    for version, num_bytes in enumerate([1 << 16, 1 << 18, 1 << 12, 1 << 20, 1 << 12]):
        ref = publisher.put(version, weights(version, num_bytes))
        assert Path(ref.path).stat().st_size == HEADER_BYTES + ref.num_bytes
        with fetcher.take(ref) as taken:
            assert fingerprint(taken.weights) == expected(version, num_bytes)


def test_a_put_that_fails_leaves_the_publisher_usable(new_publisher: NewPublisher) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding", torch.ones(100)
        raise OSError("the disk is gone")

    publisher, fetcher = new_publisher(), WeightsFetcher("a")
    before = publisher.put(1, weights(1))
    with pytest.raises(OSError, match="the disk is gone"):
        publisher.put(2, broken())
    with pytest.raises(WeightsError, match="no weights to put"):
        publisher.put(2, [])
    for ref, version in ((before, 1), (publisher.put(3, weights(3)), 3)):
        with fetcher.take(ref) as taken:
            assert fingerprint(taken.weights) == expected(version)


def test_memory_that_is_full_is_told_before_anything_is_lost(
    new_publisher: NewPublisher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(descriptor: int, offset: int, size: int) -> None:
        if size > HEADER_BYTES + (1 << 18):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, size)

    reserve = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    publisher, fetcher = new_publisher(), WeightsFetcher("a")
    before = publisher.put(1, weights(1, (1 << 18) - 4096))  # half as much again would be too much
    with pytest.raises(
        WeightsError, match=r"no room for 1 MiB of weights in .*\(No space left on device\): free memory"
    ):
        publisher.put(2, weights(2, 1 << 20))
    with fetcher.take(before) as taken:
        assert fingerprint(taken.weights) == expected(1, (1 << 18) - 4096)


@settings(max_examples=10)
@given(
    readers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=3),
    num_puts=st.integers(1, 12),
)
def test_every_take_sees_exactly_its_version(readers: list[list[int]], num_puts: int) -> None:
    """Any puts and takes, in threads. A reader's numbers say how many looks it has at what it took."""
    with tempfile.TemporaryDirectory(dir=segment_folder("test", "a").parent) as name:
        publisher, fetcher = (
            WeightsPublisher(Path(name), node="a", ways=["shared"], bucket_bytes=256),
            WeightsFetcher("a"),
        )
        newest = [publisher.put(0, [("x", torch.full((500,), 0)), ("y", torch.full((3,), 0))])]
        wrong: list[str] = []

        def read(looks: list[int]) -> None:
            for num_looks in looks:
                ref = newest[0]
                try:
                    with fetcher.take(ref) as taken:
                        for _ in range(num_looks + 1):
                            seen = {int(number) for tensor in taken.weights.values() for number in tensor}
                            if seen != {ref.version}:
                                wrong.append(f"{seen} in version {ref.version}")
                except WeightsSuperseded:
                    continue
                except WeightsError as error:
                    wrong.append(str(error))

        threads = [threading.Thread(target=read, args=(looks,)) for looks in readers]
        for thread in threads:
            thread.start()
        for version in range(1, num_puts + 1):  # three readers at most: a fourth slot is free
            newest[0] = publisher.put(version, [("x", torch.full((500,), version)), ("y", torch.full((3,), version))])
        for thread in threads:
            thread.join()
        publisher.close()
        assert not wrong


def test_a_reader_that_moves_while_a_slot_is_looked_for_does_not_make_all_of_them_look_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the oldest slot, and then, where it has moved to, in the newest."""
    publisher = WeightsPublisher(tmp_path, node="a", ways=["shared"], bucket_bytes=256)
    with contextlib.ExitStack() as readers:  # so that there are four slots
        for version in range(4):
            readers.enter_context(WeightsFetcher("a").take(publisher.put(version, [("x", torch.full((3,), version))])))
    right, num_tried = Slot.try_lock, itertools.count()
    monkeypatch.setattr(Slot, "try_lock", lambda slot: next(num_tried) >= 4 and right(slot))
    assert publisher.put(5, [("x", torch.full((3,), 5))]).version == 5
    publisher.close()


def test_those_who_ask_during_a_round_are_served_in_the_next_one_together(
    new_publisher: NewPublisher, peers: Callable[[], Peer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "millstream.weights.transfer.broadcast_sender")
    publisher = new_publisher(["broadcast"], bucket_bytes=8 * MEGABYTE)
    slow, receivers = peers(), [peers() for _ in range(3)]
    slow.stop_at(0, publisher.put(1, weights(1, 32 * MEGABYTE)))
    second = publisher.put(2, weights(2))
    for receiver in receivers:
        receiver.tell_take(second, node="b")
    time.sleep(0.5)  # all of them have asked
    slow.go_on()
    for receiver in receivers:
        assert receiver.hear()["fingerprint"] == expected(2)
    assert slow.hear()["fingerprint"] == expected(1, 32 * MEGABYTE)
    said = [record.message for record in caplog.records if "in one broadcast" in record.message]
    assert said == ["version 1 went to 1 in one broadcast", "version 2 went to 3 in one broadcast"]


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_receiver_that_dies_or_hangs_in_a_round_costs_the_others_that_round_only(
    fault: str, new_publisher: NewPublisher, peers: Callable[[], Peer]
) -> None:
    publisher = new_publisher(["broadcast"], bucket_bytes=8 * MEGABYTE, round_s=1.5)
    receivers = [peers() for _ in range(3)]
    receivers[1].ask("fault", what=fault, at=1)
    ref = publisher.put(1, weights(1, 32 * MEGABYTE))
    began = time.monotonic()
    for receiver in receivers:
        receiver.tell_take(ref, node="b")
    for receiver in (receivers[0], receivers[2]):
        assert receiver.hear()["fingerprint"] == expected(1, 32 * MEGABYTE)
    assert time.monotonic() - began < 15


def test_memory_of_a_receiver_is_used_again(new_publisher: NewPublisher, reader: Peer) -> None:
    publisher = new_publisher(["broadcast"])
    places = []
    for version in range(3):
        places.append(reader.take(publisher.put(version, weights(version)), node="c")["at"])
        reader.ask("release")
    assert len(set(places)) == 1


def test_what_was_received_stays_until_it_is_released(new_publisher: NewPublisher) -> None:
    publisher, fetcher = new_publisher(["broadcast"]), WeightsFetcher("b")
    first = fetcher.take(publisher.put(1, weights(1)))
    second = fetcher.take(publisher.put(2, weights(2)))
    assert fingerprint(first.weights) == expected(1) and fingerprint(second.weights) == expected(2)


def test_a_sender_that_dies_is_an_error_that_names_it(peers: Callable[[], Peer], folder: Path) -> None:
    sender, receiver = peers(), peers()
    sender.ask("open", folder=str(folder), ways=["broadcast"], bucket_bytes=8 * MEGABYTE)
    ref = sender.put(1, 32 * MEGABYTE)
    receiver.stop_at(0, ref)
    sender.kill()
    receiver.go_on()
    found = receiver.hear()
    assert found["error"] == "WeightsUnreachable"
    assert "no sender at 127.0.0.1" in found["says"]


def test_what_a_killed_publisher_left_is_removed_by_the_next(
    peers: Callable[[], Peer], folder: Path, new_publisher: NewPublisher
) -> None:
    living = new_publisher()
    ref = living.put(7, weights(7))
    killed = peers()
    killed.ask("open", folder=str(folder), ways=["shared"])
    orphan = killed.put(1)
    killed.kill()
    assert Path(orphan.path).exists()
    new_publisher()
    assert not Path(orphan.path).exists()
    with WeightsFetcher("a").take(ref) as taken:
        assert fingerprint(taken.weights) == expected(7)
    with pytest.raises(WeightsUnreachable, match="was closed"):
        WeightsFetcher("a").take(orphan)


def test_what_a_killed_publisher_left_goes_with_the_last_one(
    peers: Callable[[], Peer], folder: Path, new_publisher: NewPublisher
) -> None:
    last, killed = new_publisher(), peers()
    killed.ask("open", folder=str(folder), ways=["shared"])
    orphan = killed.put(1)
    killed.kill()
    assert Path(orphan.path).exists()
    last.close()
    assert not folder.exists()


def test_a_request_with_a_wrong_token_is_refused(new_publisher: NewPublisher) -> None:
    ref = new_publisher(["broadcast"]).put(1, weights(1))
    with pytest.raises(WeightsUnreachable, match="the token is not that of this publisher"):
        WeightsFetcher("b").take(with_offer(ref, structs.replace(offer_of(ref), token="0" * 32)))
    with WeightsFetcher("b").take(ref) as taken:
        assert fingerprint(taken.weights) == expected(1)


def test_noise_on_the_socket_affects_no_receiver(new_publisher: NewPublisher) -> None:
    ref = new_publisher(["broadcast"]).put(1, weights(1))
    offer = offer_of(ref)
    noise = [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, offer.token.encode(), b"\x04\0\0\0\xff\xff\xff\xff"]
    ends = [socket.create_connection((offer.host, offer.port)) for _ in noise]
    for end, said in zip(ends, noise, strict=True):
        end.sendall(said)
    with WeightsFetcher("b").take(ref) as taken:
        assert fingerprint(taken.weights) == expected(1)
    for end in ends:
        end.close()


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, as the kernel has them."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(str(path.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into /proc")
def test_nothing_listens_but_on_the_loopback_address_also_while_it_sends(
    peers: Callable[[], Peer], folder: Path
) -> None:
    sender, receiver = peers(), peers()
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    sender.ask("open", folder=str(folder), ways=["broadcast"], bucket_bytes=8 * MEGABYTE)
    ref = sender.put(1, 32 * MEGABYTE)
    assert listening(sender.pid) == {"0100007F"}
    receiver.stop_at(0, ref)
    seen = listening(sender.pid) | listening(receiver.pid)
    assert seen and seen <= loopback
    receiver.go_on()
    assert receiver.hear()["fingerprint"] == expected(1, 32 * MEGABYTE)


def test_a_host_that_is_no_address_of_this_node_is_refused(folder: Path) -> None:
    with pytest.raises(WeightsError, match="must be an address of this node"):
        WeightsPublisher(folder, node="a", ways=["broadcast"], host="192.0.2.1")
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot stage weights in"):
        WeightsPublisher(tmp_path / "file" / "slots", node="a", ways=["shared"])


def test_no_file_is_left_after_close(new_publisher: NewPublisher, folder: Path, tmp_path: Path, reader: Peer) -> None:
    publisher = new_publisher(["shared", "broadcast", "files"], files=tmp_path)
    for version in range(4):
        ref = publisher.put(version, weights(version))
    assert len(list(folder.iterdir())) == 3 and len(list(tmp_path.iterdir())) == 2
    taken = reader.take(ref)
    publisher.close()
    assert not folder.exists() and not list(tmp_path.iterdir())
    assert reader.ask("look")["fingerprint"] == taken["fingerprint"]  # who has it keeps it
    reader.ask("release")
    with pytest.raises(WeightsError, match="closed"):
        publisher.put(5, weights(5))
    found = reader.take(ref)
    assert found["error"] == "WeightsUnreachable"
    assert all(f"{way}: " in found["says"] for way in ("shared", "broadcast", "files"))


def test_putting_does_not_wait_for_receivers(new_publisher: NewPublisher, peers: Callable[[], Peer]) -> None:
    publisher, slow = new_publisher(["broadcast"], bucket_bytes=8 * MEGABYTE), peers()
    slow.stop_at(0, publisher.put(1, weights(1, 32 * MEGABYTE)))
    for version in (2, 3, 4):
        publisher.put(version, weights(version, 32 * MEGABYTE))
    slow.go_on()
    assert slow.hear()["fingerprint"] == expected(1, 32 * MEGABYTE)


def test_where_one_way_fails_the_next_is_tried_with_a_warning(
    new_publisher: NewPublisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = new_publisher(["shared", "broadcast", "files"], files=tmp_path).put(1, weights(1))
    Path(ref.path).unlink()
    with WeightsFetcher("a").take(with_offer(ref, structs.replace(offer_of(ref), port=1))) as taken:
        assert taken.way == "files" and fingerprint(taken.weights) == expected(1)
    said = [record.message for record in caplog.records if record.name == "millstream.weights.transfer.fetcher"]
    assert "not fetched by shared" in said[0] and "not fetched by broadcast" in said[1]


def test_files_of_another_version_are_not_taken(new_publisher: NewPublisher, tmp_path: Path) -> None:
    publisher = new_publisher(["files"], files=tmp_path)
    first, second = publisher.put(1, weights(1)), publisher.put(2, weights(2))
    with pytest.raises(WeightsUnreachable, match="holds version 2, expected 1"):
        WeightsFetcher("b").take(structs.replace(first, offers=second.offers))


def test_files_of_two_that_count_alike_do_not_take_each_others_place(
    new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """A learner that was begun anew counts from 1, as the driver does, and the run folder is the same."""
    ref = new_publisher(["files"], files=tmp_path).put(1, weights(1))
    other = new_publisher(["files"], files=tmp_path).put(1, weights(2))
    with WeightsFetcher("b").take(ref) as mine, WeightsFetcher("b").take(other) as theirs:
        assert fingerprint(mine.weights) == expected(1) and fingerprint(theirs.weights) == expected(2)


def test_where_no_way_leads_the_error_says_what_to_set(new_publisher: NewPublisher) -> None:
    ref = new_publisher().put(1, weights(1))
    with pytest.raises(WeightsUnreachable, match=r'add "broadcast" to resources\.weights'):
        WeightsFetcher("b").take(ref)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ways": ["pigeon"]}, "resources.weights has pigeon"),
        ({"ways": []}, "resources.weights is empty"),
        ({"ways": ["files"]}, "say in which folder"),
        ({"ways": ["shared"], "bucket_bytes": 100}, "expected a multiple of 64"),
    ],
)
def test_a_publisher_that_cannot_work_is_refused(options: dict[str, Any], says: str, folder: Path) -> None:
    with pytest.raises(WeightsError, match=says):
        WeightsPublisher(folder, node="a", **options)
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_device_memory_is_refused_where_there_is_no_gpu(folder: Path) -> None:
    with pytest.raises(WeightsError, match="torch sees no GPU here"):
        WeightsPublisher(folder, node="a", ways=["ipc"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that an publisher has, and that nobody else sees: Ray shows each process its own."""
    memory = IpcHandle(
        gpu="GPU-0",
        memory=b"",
        num_bytes=0,
        offset=0,
        counter=b"",
        counter_offset=0,
        event=b"",
        is_event_waited_for=False,
    )
    monkeypatch.setattr(DeviceBuffer, "handle", lambda buffer: memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_a_process_that_does_not_see_the_gpu_fetches_from_the_memory_of_the_node(
    new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = new_publisher(["ipc", "shared"], device=torch.device("cpu"))
    with WeightsFetcher("a").take(publisher.put(1, weights(1))) as taken:
        assert taken.way == "shared" and fingerprint(taken.weights) == expected(1)
    assert not own_messages(caplog), "nothing has failed: that is no way of its"


@pytest.mark.usefixtures("gpu")
def test_a_process_that_does_not_see_the_only_gpu_with_the_weights_gets_an_error_that_says_what_to_set(
    new_publisher: NewPublisher,
) -> None:
    ref = new_publisher(["ipc"], device=torch.device("cpu")).put(1, weights(1))
    with pytest.raises(WeightsUnreachable, match=r'staged on GPU GPU-0, .* add "shared" to resources\.weights'):
        WeightsFetcher("a").take(ref)


@pytest.mark.usefixtures("gpu")
def test_where_several_take_weights_of_a_gpu_some_may_lag_behind_and_the_next_put_does_not_fail(
    new_publisher: NewPublisher,
) -> None:
    publisher = new_publisher(["ipc", "shared"], device=torch.device("cpu"))
    taken = [WeightsFetcher("a").take(publisher.put(version, weights(version))) for version in range(3)]
    with WeightsFetcher("a").take(publisher.put(3, weights(3))) as newest:
        assert fingerprint(newest.weights) == expected(3)
    for version, one in enumerate(taken):
        assert fingerprint(one.weights) == expected(version)
        one.release()


def test_remote_weights_are_fetched_when_a_tensor_is_read(new_publisher: NewPublisher) -> None:
    staged = RemoteWeights(new_publisher().put(1, weights(1)), WeightsFetcher("a"))
    assert list(staged) == [name for name, _ in weights(1)] and len(staged) == 7
    assert not staged.is_fetched
    assert staged["scalar"].item() == 1.0 and staged.is_fetched
    assert fingerprint(staged) == expected(1)
    staged.release()
    assert not staged.is_fetched


def test_what_has_not_changed_is_staged_once_and_what_has_takes_the_place_of_what_was_there(
    new_publisher: NewPublisher, folder: Path
) -> None:
    def num_staged() -> int:
        return sum(path.suffix != OWNER_SUFFIX for path in folder.iterdir())

    cached = CachedRef(lambda: new_publisher(["shared", "broadcast"]))
    first = cached.put(dict(weights(1)))
    assert cached.put(dict(weights(1))) == first and num_staged() == 1
    with WeightsFetcher("a").take(first) as old:
        second = cached.put(dict(weights(2)))
        assert num_staged() == 1 and fingerprint(old.weights) == expected(1)
    with WeightsFetcher("b").take(second) as taken:
        assert fingerprint(taken.weights) == expected(2)
    with pytest.raises(WeightsUnreachable, match="was closed"):
        WeightsFetcher("a").take(first)
    Path(second.path).unlink()
    with WeightsFetcher("a").take(cached.put(dict(weights(2)))) as taken:
        assert taken.way == "shared" and fingerprint(taken.weights) == expected(2)
    cached.close()
    assert not folder.exists()


def test_where_there_is_no_room_for_what_has_changed_what_was_there_stays(
    new_publisher: NewPublisher, folder: Path
) -> None:
    cached = CachedRef(new_publisher)
    first = cached.put(dict(weights(1)))
    with pytest.raises(WeightsError, match="no weights to put"):
        cached.put({})
    with WeightsFetcher("a").take(first) as taken:
        assert fingerprint(taken.weights) == expected(1)
    assert cached.put(dict(weights(1))) == first


def test_a_remote_channel_only_rises_and_takes_the_same_version_staged_again(new_publisher: NewPublisher) -> None:
    async def go() -> None:
        async def restage(version: int) -> RemoteWeights:
            return RemoteWeights(new_publisher().put(version, weights(version)), fetcher)

        channel, fetcher = RemoteChannel(restage), WeightsFetcher("a")
        with pytest.raises(WeightsError, match="nothing has been published"):
            await channel.fetch()
        await channel.publish(3, RemoteWeights(publisher.put(3, weights(3)), fetcher))
        with pytest.raises(WeightsError, match="versions only rise"):
            await channel.publish(3, RemoteWeights(publisher.put(3, weights(3)), fetcher))
        with pytest.raises(WeightsError, match="expected RemoteWeights"):
            await channel.publish(4, {"x": torch.ones(1)})
        await channel.publish(4, RemoteWeights(publisher.put(4, weights(4)), fetcher))
        publisher.close()  # its learner has died
        with pytest.raises(WeightsError):
            fingerprint((await channel.fetch()).weights)
        assert await channel.restage() is not None
        found = await channel.fetch()
        assert channel.version == found.version == 4
        assert fingerprint(found.weights) == expected(4)

    publisher = new_publisher()
    asyncio.run(go())


def test_what_is_published_while_an_older_version_is_staged_again_stays(new_publisher: NewPublisher) -> None:
    async def go() -> None:
        publisher, fetcher = new_publisher(), WeightsFetcher("a")

        async def restage(version: int) -> RemoteWeights:
            staged = RemoteWeights(publisher.put(version, weights(version)), fetcher)
            await channel.publish(5, RemoteWeights(publisher.put(5, weights(5)), fetcher))
            return staged

        channel = RemoteChannel(restage)
        await channel.publish(4, RemoteWeights(publisher.put(4, weights(4)), fetcher))
        await channel.restage()
        found = await channel.fetch()
        assert found.version == 5 and fingerprint(found.weights) == expected(5)

    asyncio.run(go())
