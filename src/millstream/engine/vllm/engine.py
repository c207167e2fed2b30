"""vLLM as an engine: its continuous batching, its kernels and its tensor parallelism behind the promises of the seam.

vLLM's core, which schedules and samples, always has a process of its own. The rest of it (AsyncLLM: requests out, outputs
in, a few hundred microseconds of Python a step) runs in a process of ours, or, with `engine.process = false`, on a thread
here. In a process Ctrl-C does not reach it, what vLLM changes in an interpreter stays there, and a script of the user's needs
no guard around its main part, since vLLM starts its core from the main module. The promises are the same.

Weights go into shared memory that vLLM's workers map, or into a file that they read; in both cases in the names and shapes of a
checkpoint, and vLLM's `reload_weights` makes its own layout of them.

What differs from our own engine: a continued request (`Request.num_sampled`) has the right distribution and new randomness, not
that which it would have had; a greedy request's log-probabilities are those of temperature 1 without top-k and top-p.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from millstream.clock import Clock
from millstream.engine import EngineConfig, OnSampled
from millstream.engine.native.child import ChildHost, SocketLink
from millstream.engine.native.engine import CLOSE_S, Host, OnReport, TorchEngine
from millstream.engine.native.worker import Close, Command, Report
from millstream.engine.vllm.arguments import Plan
from millstream.engine.vllm.config import VllmConfig, check_installed
from millstream.engine.vllm.worker import VllmWorker
from millstream.errors import EngineError, RequestRefused
from millstream.events import EventSink
from millstream.model.load import context_length, model_weights
from millstream.model.shared_memory import Layout, SharedWeights, anonymous_memory, layout_of
from millstream.rpc.frames import Frames
from millstream.rpc.process import LocalLauncher
from millstream.types import Completion, Request, Weights


class VllmEngine(TorchEngine):
    """See `millstream.engine.Engine` for the promises."""

    def __init__(
        self,
        host: Host,
        *,
        vocabulary: int,
        slots: int,
        max_length: int | None,
        clock: Clock,
        sink: EventSink,
        answer_s: float,
        name: str,
    ) -> None:
        self._vocabulary = vocabulary
        super().__init__(host, slots=slots, max_length=max_length, clock=clock, sink=sink, answer_s=answer_s, name=name)

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        if strange := [token for token in request.tokens if not 0 <= token < self._vocabulary]:
            raise RequestRefused(
                f"{request.key}: the model has {self._vocabulary} tokens, and the prompt has {strange[0]}"
            )
        return await super().generate(request, on_sampled)


def build_vllm(
    config: EngineConfig, model: PreTrainedModel, *, clock: Clock, sink: EventSink, name: str = "engine"
) -> VllmEngine:
    """The model itself is only read, here and now."""
    check_installed()
    plan, parcel = _plan(config, model)
    return VllmEngine(
        ThreadHost(plan, parcel) if config.process is False else ProcessHost(plan, parcel),
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        slots=config.slots,
        max_length=plan.max_length,
        clock=clock,
        sink=sink,
        answer_s=config.answer_s,
        name=name,
    )


def _plan(config: EngineConfig, model: PreTrainedModel) -> tuple[Plan, Parcel]:
    vllm, weights = config.vllm or VllmConfig(), model_weights(model)
    layout, folder = layout_of(weights), Path(tempfile.mkdtemp(prefix="millstream-vllm-"))
    described = copy.deepcopy(model.config)
    described.architectures = [type(model).__name__]
    described.save_pretrained(folder)
    parcel = InMemory(layout, folder) if vllm.weights == "shared" else InFiles(folder)
    parcel.write(weights)
    limits = [limit for limit in (context_length(model), vllm.max_model_len) if limit is not None]
    plan = Plan(
        folder=str(folder),
        memory=parcel.memory,
        layout=layout,
        slots=config.slots,
        prefill_tokens=config.prefill_tokens,
        max_length=min(limits, default=None),
        dtype=vllm.dtype or str(model.dtype).removeprefix("torch."),
        is_cpu=not torch.cuda.is_available(),
        vllm=vllm,
    )
    return plan, parcel


class Parcel(Protocol):
    """Where weights lie for vLLM's workers to fetch: one version at a time."""

    memory: str | None
    """Where any process of this user finds them. None: in the model's folder."""

    def write(self, weights: Weights) -> None:
        """They fit."""
        ...

    def discard(self) -> None:
        """A second time it does nothing."""
        ...


class InMemory:
    """The memory has no name in any file system: others find it through our descriptor, as long as this process lives."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        self._folder = folder
        try:
            self._descriptor: int | None = anonymous_memory(layout.ends[-1])
        except OSError as error:
            raise EngineError(
                f"no room for {layout.ends[-1] / 2**20:.0f} MiB of shared weights ({error.strerror}): set "
                'engine.vllm.weights = "file"'
            ) from error
        self._shared = SharedWeights(self._descriptor, layout)
        self.memory: str | None = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, weights: Weights) -> None:
        self._shared.write(weights)

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class InFiles:
    memory: str | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, weights: Weights) -> None:
        """Whole or not at all: it is renamed when it is complete."""
        tensors = {name: value.detach().to("cpu").contiguous() for name, value in weights.items()}
        save_file(tensors, self._folder / "writing", metadata={"format": "pt"})
        (self._folder / "writing").replace(self._folder / "model.safetensors")

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _Offering:
    """The first weights are vLLM's to fetch as it starts: the next ones wait until it has them."""

    def __init__(self, plan: Plan, parcel: Parcel) -> None:
        self._shapes = {name: shape for name, _, shape in plan.layout.tensors}
        self._parcel = parcel
        self._is_fetched = threading.Event()

    def hearing(self, on_report: OnReport) -> OnReport:
        """With its first word, be it that it is broken, it needs the first weights no longer."""

        def hear(report: Report) -> None:
            self._is_fetched.set()
            on_report(report)

        return hear

    def offer(self, weights: Weights) -> None:
        differing = {name: tuple(value.shape) for name, value in weights.items()}.items() ^ self._shapes.items()
        if differing:
            raise EngineError(f"the weights do not fit: {sorted({name for name, _ in differing})[:4]}")
        self._is_fetched.wait()
        try:
            self._parcel.write(weights)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights could not be written: {error}") from error

    def end(self) -> None:
        self._is_fetched.set()
        self._parcel.discard()


class ProcessHost(ChildHost):
    """AsyncLLM in a process of ours. See `millstream.engine.native.engine.Host`."""

    def __init__(self, plan: Plan, parcel: Parcel) -> None:
        self._offering = _Offering(plan, parcel)
        child = LocalLauncher().launch("engine", "millstream.engine.vllm.engine", name="vLLM")
        super().__init__(lambda: child, plan)
        self._child = child

    def start(self, on_report: OnReport) -> None:
        super().start(self._offering.hearing(on_report))

    def offer(self, weights: Weights) -> None:
        self._offering.offer(weights)

    def join(self) -> None:
        super().join()
        self._offering.end()


class ThreadHost:
    """AsyncLLM on a thread of this process, with an event loop of its own. See `millstream.engine.native.engine.Host`."""

    def __init__(self, plan: Plan, parcel: Parcel) -> None:
        self._plan = plan
        self._offering = _Offering(plan, parcel)
        self._loop = asyncio.new_event_loop()
        self._commands: asyncio.Queue[Command] = asyncio.Queue()

    def start(self, on_report: OnReport) -> None:
        worker = VllmWorker(self._plan, self._offering.hearing(on_report))
        self._thread = threading.Thread(target=self._work, args=(worker,), name="engine", daemon=True)
        self._thread.start()

    def _work(self, worker: VllmWorker) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(worker.run(self._commands))

    def offer(self, weights: Weights) -> None:
        self._offering.offer(weights)

    def send(self, command: Command) -> None:
        with suppress(RuntimeError):  # its loop has ended: whoever waits has heard of it
            self._loop.call_soon_threadsafe(self._commands.put_nowait, command)

    def join(self) -> None:
        self._thread.join(CLOSE_S)
        self._offering.end()


def work(line: socket.socket) -> None:
    """The worker: until the socket closes."""
    frames = Frames(line)
    plan = frames.first_as(Plan)
    if plan is None:
        return
    link = SocketLink(line, frames, {})

    async def serve() -> None:
        commands: asyncio.Queue[Command] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            is_open = True
            while is_open:
                for command in link.receive(block=True):
                    is_open = is_open and not isinstance(command, Close)
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(commands.put_nowait, command)

        threading.Thread(target=read, name="commands", daemon=True).start()
        await VllmWorker(plan, link.send).run(commands)

    asyncio.run(serve())


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    work(socket.socket(fileno=int(sys.argv[1])))
