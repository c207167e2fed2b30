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
from millstream.weights.transfer.broadcast import NcclFetch, why_no_nccl
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


def expected(version: int) -> str:
    return fingerprint(dict(weights(version)))


@pytest.mark.parametrize(
    ("ways", "is_on_host"), [(["nccl"], False), (["nccl", "files"], False), (["nccl", "broadcast"], True)]
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


def test_a_device_without_room_for_a_version_gets_it_and_all_later_ones_by_the_next_way(
    new_publisher: NewPublisher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, fetcher = new_publisher(["nccl", "broadcast"]), WeightsFetcher("b", device=CPU)
    fetch = fetcher._fetches["nccl"]
    assert isinstance(fetch, NcclFetch)

    def no_room(num_bytes: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with fetcher.take(publisher.put(1, weights(1))) as taken:
        assert taken.way == "nccl"
    monkeypatch.setattr(fetch, "_allocate", no_room)
    for version in (2, 3):
        with fetcher.take(publisher.put(version, weights(version))) as taken:
            assert taken.way == "broadcast" and fingerprint(taken.weights) == expected(version)
    said = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert len(said) == 1


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
    assert 'use "broadcast"' in caplog.text
    with pytest.raises(WeightsError, match=r'resources\.weights has "nccl", and it does not work here'):
        new_publisher(["nccl"], device=None)
