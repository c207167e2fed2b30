"""Where an engine's worker runs: on a thread of this process (`ThreadHost`) or in a process of its own (`ProcessHost`)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from transformers import PreTrainedModel

from millstream.engine import EngineConfig
from millstream.engine.native.build import batcher_of
from millstream.engine.native.strings import DecodeTokens
from millstream.engine.native.worker import Close, Command, DecodeWorker, Offer, WorkerReport
from millstream.errors import ClusterError, WeightsError, WeightsUnreachable, WorkerError, WorkerExited
from millstream.rpc.call import CLOSE_S, Remote
from millstream.rpc.process import WorkerProcess
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef

OnReport = Callable[[WorkerReport], None]
Publish = Callable[[int, Weights], WeightsRef]
ENGINE_START_S = 180.0  # from the start of a process to its first report


class EngineHost(Protocol):
    """The engine's end of the connection to a worker. Reports come on a thread of the host's choice."""

    def start(self, on_report: OnReport) -> None: ...

    def send(self, command: Command) -> None:
        """Queue a command. Called on an event loop; never blocks. If the worker is gone, a report with the reason comes, or has
        come."""
        ...

    def offer(self, version: int, weights: Weights) -> str:
        """Bring the weights of the next `Load` to the worker. Blocks until they are there: a copy, or a transfer. Returns the
        way by which they came; empty: they are in this process. Raises `WeightsError` if the worker could not fetch them,
        `WorkerExited` if it is gone."""
        ...

    async def close(self) -> None:
        """End requests in flight as aborted and stop the worker; after `CLOSE_S`, kill it."""
        ...


class ThreadHost:
    """A worker on a thread of this process. The model is the worker's own from here on; nothing is copied."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, decode: DecodeTokens | None = None) -> None:
        self._batcher = batcher_of(model, config, decode)
        self._link = ThreadLink()
        self._worker = DecodeWorker(self._batcher, self._link, config.news_s)

    def start(self, on_report: OnReport) -> None:
        self._link.send = on_report
        self._thread = threading.Thread(target=self._worker.run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._link.put(command)

    def offer(self, version: int, weights: Weights) -> str:
        self._link.offered = weights
        return ""

    async def close(self) -> None:
        self._link.put(Close())
        await asyncio.to_thread(self._thread.join, CLOSE_S)


class ThreadLink:
    """The link of a worker on a thread: a queue. See `millstream.engine.native.worker.Link`."""

    send: OnReport
    offered: Weights

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()

    def put(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def receive(self, *, block: bool) -> list[Command]:
        with self._changed:
            while block and not self._commands:
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def weights(self) -> Weights:
        return self.offered

    def release(self) -> None:
        """They are the caller's: there is nothing to free."""


class ProcessHost:
    """A worker in a process of its own, on this machine or on a node of a cluster. It may start late: commands wait for it.

    Commands of one turn of the event loop are sent by one system call, and a worker that does not read blocks nothing. Weights
    reach the worker as a `WeightsRef`: it fetches and verifies them while decoding continues. The worker ends when its
    connection closes, and its end is a report with the exit reason. No pickle.
    """

    def __init__(
        self,
        launch: Callable[[], WorkerProcess],
        setup: Any,
        publish: Publish,
        *,
        name: str,
        answer_s: float,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """`launch` is called on a thread; it bounds its own time. `setup`: the worker's first message. `publish` makes weights
        of this process available to the worker. `on_close`: frees what the worker read."""
        self._launch = launch
        self._setup = setup
        self._publish = publish
        self._name = name
        self._answer_s = answer_s
        self._on_close = on_close
        self._is_launched = threading.Event()  # or never will be
        self._is_closing = False

    def start(self, on_report: OnReport) -> None:
        self._on_report = on_report
        self.remote = Remote(
            self._launch_worker,
            self._setup,
            name=self._name,
            messages=WorkerReport,
            on_message=lambda report, number: on_report(report),
            on_exit=self._on_exit,
        )
        self.remote.ready.add_done_callback(self._on_ready)

    def _launch_worker(self) -> WorkerProcess:
        try:
            return self._launch()
        finally:
            self._is_launched.set()

    def _on_ready(self, ready: Future[None]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            self._on_report(WorkerReport([], []))  # from here on, silence with work to do is a fault

    def _on_exit(self, error: Exception) -> None:
        if not self._is_closing:
            self._on_report(_broken_by(error))

    def send(self, command: Command) -> None:
        self.remote.post(command)

    def offer(self, version: int, weights: Weights) -> str:
        """The time until the worker is ready does not count: the launcher and `ENGINE_START_S` limit it."""
        self._wait_until_ready()
        taken: Future[str] = self.remote.call(Offer(self._publish(version, weights)), str)
        try:
            return taken.result(self._answer_s)
        except TimeoutError:
            raise WeightsUnreachable(
                f"version {version} was offered and not fetched within {self._answer_s:g} s; engine.answer_s sets the limit"
            ) from None

    def _wait_until_ready(self) -> None:
        self._is_launched.wait()
        limit_s = max(self._answer_s, ENGINE_START_S)
        try:
            self.remote.ready.result(limit_s)
        except TimeoutError:
            reason = f"it has reported nothing in the {limit_s:g} s since its process was started"
            self._on_report(
                WorkerReport([], [], broken=reason)
            )  # before the exit reason, which would only say that it was killed
            self.remote.kill()
            raise WorkerExited(reason) from None
        except Exception as error:  # whatever it was, there is no worker
            self._on_report(_broken_by(error))  # as `_on_exit` will: which of the two comes first is open
            raise WorkerExited(_words(error)) from error

    async def close(self) -> None:
        self._is_closing = True
        self._is_launched.set()
        await asyncio.to_thread(self.remote.close, CLOSE_S)
        self._on_close()


def _broken_by(error: Exception) -> WorkerReport:
    """A worker that could not be built would not be built the next time, unless weights, files or a place were missing."""
    may_heal = isinstance(error, WorkerExited | WeightsError | ClusterError | OSError)
    return WorkerReport([], [], broken=_words(error), is_raised=not may_heal)


def _words(error: Exception) -> str:
    """Why there is no worker: an exit reason, or why it could not be built."""
    if isinstance(error, WorkerExited):
        return str(error)
    return f"it could not begin: {error if isinstance(error, WorkerError) else f'{type(error).__name__}: {error}'}"
