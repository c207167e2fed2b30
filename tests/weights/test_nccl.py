"""The transport "nccl", over gloo: both ends' devices are the CPU, and all of it runs but NCCL's own group. What needs GPUs is in
`test_gpu_weights.py`; NCCL between several GPUs has not been run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream.errors import WeightsError, WeightsUnreachable
from millstream.model.shared_memory import layout_of
from millstream.store.segments import segment_folder
from millstream.weights import TransferWay
from millstream.weights.transfer import broadcast
from millstream.weights.transfer.broadcast import NcclFetch, host_buffer, why_no_nccl
from millstream.weights.transfer.broadcast import Peer as Connection
from millstream.weights.transfer.broadcast_sender import NcclStage, Receiver, one_round
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.slots import HEADER_BYTES
from support.weight_peers import Peer, forks
from support.weight_worker import fingerprint, weights

BUCKET = 1 << 14
CPU = torch.device("cpu")
NewPublisher = Callable[..., WeightsPublisher]


@pytest.fixture(scope="module")
def new_peer() -> Iterator[Callable[[], Peer]]:
    with forks() as new:
        yield new


@pytest.fixture
def new_publisher() -> Iterator[NewPublisher]:
    publishers: list[WeightsPublisher] = []
    with tempfile.TemporaryDirectory(dir=segment_folder("test", "a").parent) as name:

        def new(ways: Sequence[TransferWay], **options: Any) -> WeightsPublisher:
            settings = {"bucket_bytes": BUCKET, "device": CPU, **options}
            publishers.append(WeightsPublisher(Path(name) / "slots", node="a", ways=ways, **settings))
            return publishers[-1]

        yield new
        for publisher in publishers:
            publisher.close()


def expected(version: int, num_bytes: int = 1 << 16) -> str:
    return fingerprint(dict(weights(version, num_bytes)))


@pytest.mark.parametrize(
    ("ways", "is_on_host"), [(["nccl"], False), (["nccl", "files"], True), (["nccl", "broadcast"], True)]
)
def test_every_byte_of_a_version_reaches_another_process_from_the_copy_on_the_device_or_from_the_hosts(
    ways: list[TransferWay],
    is_on_host: bool,
    new_publisher: NewPublisher,
    new_peer: Callable[[], Peer],
    tmp_path: Path,
) -> None:
    publisher, receiver = new_publisher(ways, files=tmp_path), new_peer()
    for version in (3, 4):
        layout = layout_of(dict(weights(version)))
        ref = publisher.put(version, weights(version), layout)
        assert (Path(ref.path).stat().st_size > HEADER_BYTES) == is_on_host
        found = receiver.take(ref, node="b", device="cpu")
        assert (found["way"], found["version"], found["fingerprint"]) == ("nccl", version, expected(version))
        receiver.ask("release")
    receiver.kill()


def test_a_device_is_given_all_its_memory_at_once_though_tensors_come_one_at_a_time(
    new_publisher: NewPublisher,
) -> None:
    publisher, sizes = new_publisher(["nccl"]), list[int]()
    found = dict(weights(1))

    def one_at_a_time() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in found.items():
            (buffer,) = publisher._buffers._buffers.values()
            sizes.append(len(buffer.bytes))
            yield name, value

    ref = publisher.put(1, one_at_a_time(), layout_of(found))
    assert set(sizes) == {ref.num_bytes}


def test_where_the_first_try_fails_the_next_way_is_used_and_it_is_not_tried_again(
    new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, fetcher = new_publisher(["nccl", "broadcast"]), WeightsFetcher("b", device=CPU)
    stage, fetch = publisher._stages["nccl"], fetcher._fetches["nccl"]
    assert isinstance(stage, NcclStage) and isinstance(fetch, NcclFetch)
    stage.gpu = fetch.gpu = "GPU-0"  # NCCL has each GPU once
    for version in (1, 2):
        with fetcher.take(publisher.put(version, weights(version))) as taken:
            assert taken.way == "broadcast" and fingerprint(taken.weights) == expected(version)
    said = [record.getMessage() for record in caplog.records if "nccl" in record.getMessage()]
    assert len(said) == 1 and "both ends use GPU GPU-0" in said[0]


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclFetch, "_has_room", lambda fetch, num_bytes: False)


def test_where_the_device_has_no_room_a_version_arrives_through_two_buckets_there_in_the_hosts_memory(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    publisher, fetcher = new_publisher(["nccl", "broadcast"]), WeightsFetcher("b", device=CPU)
    fetch = fetcher._fetches["nccl"]
    assert isinstance(fetch, NcclFetch)
    used = list[int]()
    for version in (1, 2):
        ref = publisher.put(version, weights(version))
        with fetcher.take(ref) as taken:
            assert len(ref.digests) > 4 and taken.way == "nccl" and fingerprint(taken.weights) == expected(version)
        (buffer,) = fetch._free
        assert [len(bucket) for bucket in buffer.bounce] == [BUCKET, BUCKET]
        used.append(buffer.flat.data_ptr())
    assert used[0] == used[1], "it is allocated once"


def test_a_wrong_bucket_that_comes_through_the_device_is_found_before_any_of_the_version_is_handed_out(
    new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    publisher, fetcher = new_publisher(["nccl"]), WeightsFetcher("b", device=CPU)
    ref = publisher.put(1, weights(1))
    (buffer,) = publisher._buffers._buffers.values()
    last = len(ref.digests) - 1  # when it arrives, the sender is not in the middle of a round of this process
    buffer.bytes[last * BUCKET + 7] ^= 1
    with pytest.raises(WeightsError, match=f"bucket {last} of version 1"):
        fetcher.take(ref)


def test_where_neither_device_nor_host_has_room_this_and_all_later_versions_come_by_the_next_way(
    new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, fetcher = new_publisher(["nccl", "broadcast"]), WeightsFetcher("b", device=CPU)

    def no_room(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        raise RuntimeError("no room")

    with fetcher.take(publisher.put(1, weights(1))) as taken:
        assert taken.way == "nccl"
    without_room(monkeypatch)
    monkeypatch.setattr(broadcast, "host_buffer", no_room)
    for version in (2, 3):
        larger = 1 << (16 + version)  # the memory of the version before is too small
        with fetcher.take(publisher.put(version, weights(version, larger))) as taken:
            assert taken.way == "broadcast" and fingerprint(taken.weights) == expected(version, larger)
    said = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert len(said) == 1


def test_on_one_node_the_order_of_the_ways_says_which_is_used_and_the_next_one_where_it_fails(
    new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, fetcher = new_publisher(["nccl", "shared"]), WeightsFetcher("a", device=CPU)
    with fetcher.take(publisher.put(1, weights(1))) as taken:
        assert taken.way == "nccl" and fingerprint(taken.weights) == expected(1)
    elsewhere = WeightsFetcher("a", device=torch.device("cuda"))
    if not torch.cuda.is_available():
        assert elsewhere.ways(publisher.put(2, weights(2))) == ["shared"]
    stage = publisher._stages["nccl"]
    stage.close()
    with WeightsFetcher("a", device=CPU).take(publisher.put(3, weights(3))) as taken:
        assert taken.way == "shared" and fingerprint(taken.weights) == expected(3)
    assert "version 3 was not fetched by nccl" in caplog.text
    assert new_publisher(["shared", "nccl"]).put(4, weights(4)).offers.keys() == {"shared", "nccl"}


def test_where_a_node_has_no_copy_that_a_process_can_use_the_error_says_what_to_add(
    new_publisher: NewPublisher,
) -> None:
    publisher, fetcher = new_publisher(["nccl"]), WeightsFetcher("a", device=CPU)
    fetch = fetcher._fetches["nccl"]
    assert isinstance(fetch, NcclFetch)
    fetch._is_usable = False
    with pytest.raises(WeightsUnreachable, match=r'none of its ways \(nccl\): add "shared" to resources.weights'):
        fetcher.take(publisher.put(1, weights(1)))


def test_one_that_has_worked_is_tried_again_after_a_failure(new_publisher: NewPublisher) -> None:
    publisher, fetcher = new_publisher(["nccl"]), WeightsFetcher("b", device=CPU)
    fetch = fetcher._fetches["nccl"]
    with fetcher.take(publisher.put(1, weights(1))):
        pass
    last = publisher.put(2, weights(2))
    publisher.close()
    with pytest.raises(WeightsUnreachable, match="no sender at"):
        fetcher.take(last)
    assert fetch.can_fetch(last)


def test_receivers_on_one_gpu_are_in_different_rounds_and_those_on_the_host_in_one() -> None:
    peer = Connection.__new__(Connection)

    def rounds(gpus: list[str]) -> list[int]:
        waiting, found = [Receiver(peer, 7, gpu) for gpu in gpus], list[int]()
        while waiting:
            together = one_round(waiting)
            found.append(len(together))
            waiting = [one for one in waiting if not any(one is other for other in together)]
        return found

    assert rounds(["x", "y", "x", "x"]) == [2, 1, 1]
    assert rounds(["", "", ""]) == [3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_left_out_with_a_warning_or_refused_where_it_is_the_only_way(
    new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    assert "no GPU" in why_no_nccl(torch.device("cuda")) and not why_no_nccl(CPU)
    publisher = new_publisher(["nccl", "broadcast"], device=None)
    assert set(publisher.put(1, weights(1)).offers) == {"broadcast"}
    assert 'use "shared" on one node, "broadcast" between nodes' in caplog.text
    with pytest.raises(WeightsError, match=r'resources\.weights has "nccl", and it does not work here'):
        new_publisher(["nccl"], device=None)


def test_a_process_that_must_not_use_nccl_takes_the_next_way_without_a_try(new_publisher: NewPublisher) -> None:
    publisher = new_publisher(["nccl", "shared"])
    with WeightsFetcher("a", device=CPU, without=("nccl",)).take(publisher.put(1, weights(1))) as taken:
        assert taken.way == "shared" and fingerprint(taken.weights) == expected(1)


def test_memory_of_the_host_is_pinned_as_it_is_and_released_when_nobody_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = dict[int, int]()

    class Cuda:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
            pinned[address] = num_bytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            del pinned[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    flat = host_buffer(1_000_001, is_pinned=True)
    part = flat[10:20].view(torch.int16)
    assert pinned == {flat.data_ptr(): 1_000_001}
    del flat
    assert len(pinned) <= 1 and part.fill_(7).sum() == 35
    del part
    assert not pinned
