"""Our engine's worker process: builds the model from its setup, fetches the first weights, and runs the decode loop.

Weights are fetched and verified on a thread of their own; only then does the swap wait for its turn between two steps. Decoding
stands still for as long as the copy takes, not for as long as the transfer does.
"""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from msgspec import Struct
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.decoding import decode_msgpack, msgpack_decoder
from millstream.engine import EngineConfig
from millstream.engine.base import EngineLine
from millstream.engine.native.batching import Batcher
from millstream.engine.native.build import batcher_of
from millstream.engine.native.lines import LinkHub
from millstream.engine.native.worker import Close, Command, DecodeWorker, Offer, WorkerReport
from millstream.errors import MillstreamError
from millstream.model.adapters import add_adapters, lora_of
from millstream.model.load import FEW_CORES, decoder_of, load_tokenizer, model_weights, num_cores, set_up_cpu
from millstream.model.lora import LoraConfig
from millstream.model.spec import build_described, described, has_own_code
from millstream.rpc.call import CLOSE_S, Channel, Packet, PacketKind
from millstream.rpc.process import own_node
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.base import FetchedWeights
from millstream.weights.transfer.fetcher import WeightsFetcher

ENGINE_WORKER = "millstream.engine.native.process:serve_engine"
T = TypeVar("T")
DECODE_NICE = 5
"""Added to the niceness of the decode loop where it shares few cores with a driver and a learner. They get the processor first;
meanwhile requests gather, and a step over more of them takes less time per token (92 in the place of 68 in the demo)."""


class EngineSetup(Struct, frozen=True, kw_only=True):
    """The first message: what a worker needs to build the model and to begin."""

    config: EngineConfig
    dtype: str
    device: str
    lora: LoraConfig | None
    files: dict[str, bytes]  # the model's config and, for stop strings, the tokenizer: as they are saved
    has_tokenizer: bool
    first: WeightsRef  # the whole model
    has_lines: bool = False  # whether it takes requests of rollout workers


def engine_setup(
    model: PreTrainedModel,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    device: str,
    first: WeightsRef,
    has_lines: bool = False,
) -> EngineSetup:
    return EngineSetup(
        config=config,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        lora=lora_of(model),
        files=described(model, tokenizer),
        has_tokenizer=tokenizer is not None,
        first=first,
        has_lines=has_lines,
    )


# ---- in the worker's process -----------------------------------------------------------------------------------------------


def serve_engine(connection: socket.socket) -> None:
    """The life of a worker: until it is closed, or its connection is."""
    set_up_cpu()
    link = FetchingLink(connection)
    setup = link.first(EngineSetup)
    if setup is None:
        return
    try:
        link.fetch(setup.first)
        batcher = build_batcher(setup, link.weights())
        link.release()
        if setup.has_lines:
            link.open_lines()
    except Exception as error:  # process boundary: the engine gets the reason
        link.refuse(error)
    else:
        link.begin(link.fetch)
        if setup.device == "cpu" and num_cores() <= FEW_CORES:
            with suppress(OSError):  # a container may refuse it
                os.nice(DECODE_NICE)  # of this thread: weights are fetched without delay
        DecodeWorker(batcher, link, setup.config.news_s).run()
    link.drain()


def build_batcher(setup: EngineSetup, weights: Mapping[str, Tensor]) -> Batcher:
    """The model of the setup, with these weights, ready to decode."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        for name, data in setup.files.items():
            (Path(folder) / name).write_bytes(data)
        is_trusted = has_own_code(folder)
        decode = decoder_of(load_tokenizer(folder, trust_remote_code=is_trusted)) if setup.has_tokenizer else None
        with torch.device(setup.device):  # built where it will be: random numbers for all of it take long on a CPU
            model = build_described(folder, dtype=setup.dtype)
    if setup.lora is not None:
        add_adapters(model, setup.lora, seed=0)
    with torch.no_grad():
        for name, own in model_weights(model).items():
            own.copy_(weights[name])
    return batcher_of(model, setup.config, decode)


class ChannelLink:
    """The worker's end of a connection: its setup, commands and offers in, reports out."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel = Channel(connection)
        self._hub: LinkHub | None = None
        self._line: EngineLine | None = None  # to be reported
        self._setup_call = 0
        self._unread: list[Packet] = []  # commands that came with the setup
        self._offers: queue.SimpleQueue[tuple[int, WeightsRef]] = queue.SimpleQueue()

    def first(self, kind: type[T]) -> T | None:
        """The setup. None: the engine is gone."""
        while not self._unread:
            packets = self._channel.receive(block=True)
            if packets is None:
                return None
            self._unread += packets
        setup = self._unread.pop(0)
        self._setup_call = setup.number
        return None if setup.kind is PacketKind.CLOSE else decode_msgpack(setup.body, kind)

    def begin(self, take_offer: Callable[[WeightsRef], str]) -> None:
        """Tell the engine that the worker is ready. Offers are taken on a thread of their own, one after the other; what
        `take_offer` returns or raises is the engine's answer."""
        threading.Thread(target=self._take_offers, args=(take_offer,), name="weights", daemon=True).start()
        self._channel.answer(self._setup_call, None)

    def refuse(self, error: Exception) -> None:
        """Tell the engine why there will be no worker."""
        if not isinstance(error, MillstreamError | OSError):  # their text says it all
            traceback.print_exception(error)
        self._channel.fail(self._setup_call, error)

    def open_lines(self) -> None:
        """Take requests of other processes, too."""
        self._hub = LinkHub()
        self._line = self._hub.address

    def receive(self, *, block: bool) -> list[Command]:
        while True:
            packets: list[Packet] | None = self._unread
            self._unread = []
            commands: list[Command] = []
            if not packets and self._hub is not None:
                is_driver, commands = self._hub.wait(self._connection, block=block)
                packets = self._channel.receive(block=False) if is_driver else []
            elif not packets:
                packets = self._channel.receive(block=block)
            if packets is None:
                return [*commands, self._close()]
            for packet in packets:
                if packet.kind is PacketKind.CALL:
                    self._offers.put((packet.number, msgpack_decoder(Offer).decode(packet.body).ref))
                else:
                    is_close = packet.kind is PacketKind.CLOSE
                    commands.append(self._close() if is_close else msgpack_decoder(Command).decode(packet.body))
            if commands or not block:
                return commands

    def _close(self) -> Close:
        if self._hub is not None:
            self._hub.close()
        return Close()

    def _take_offers(self, take_offer: Callable[[WeightsRef], str]) -> None:
        while True:
            number, ref = self._offers.get()
            try:
                way = take_offer(ref)
            except Exception as error:  # process boundary: the engine gets the reason
                self._channel.fail(number, error)
            else:
                self._channel.answer(number, way)

    def send(self, report: WorkerReport) -> None:
        if self._hub is None:
            self._channel.send(report)
            return
        report = self._hub.split(report)
        report.line = self._line
        self._line = None
        news = (report.finished, report.done, report.spans, report.sampled, report.refused)
        if any(news) or report.broken or report.path or report.line:  # otherwise it is of lines alone
            self._channel.send(report)

    def drain(self) -> None:
        self._channel.drain(CLOSE_S)


class FetchingLink(ChannelLink):
    """The link of our own decode loop (see `worker.Link`): holds the weights that were offered last until they are loaded."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._fetcher = WeightsFetcher(own_node())
        self._taken: FetchedWeights | None = None

    def fetch(self, ref: WeightsRef) -> str:
        """The way by which they came."""
        self.release()  # of an offer that was never loaded
        self._taken = self._fetcher.take(ref)
        return self._taken.way

    def weights(self) -> Weights:
        return {} if self._taken is None else self._taken.weights

    def release(self) -> None:
        """The weights are in use: their memory may be overwritten, once the device has read it."""
        taken = self._taken
        self._taken = None
        if taken is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.release()
