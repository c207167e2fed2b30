"""Alerts: a command and a web hook that are called on findings, stalls, failures and the end of a run.

Each is called on a thread of its own: nothing of the run waits for them, and neither waits for the other. At most one alert of
a kind is sent in `every_s`; what happens meanwhile is counted, and in the next one. The end of the run is sent at once, before
all that waits. A call that fails is repeated by the rule of `retry`, a timeout only while the run is active; one that fails for
good is a warning, and never ends the run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct

from millstream.errors import shown
from millstream.events import (
    EVENT_LOOP,
    CheckpointFailed,
    Event,
    FindingMade,
    LearnerRestarted,
    ReplicaLeft,
    Resumed,
    RunEnded,
    Stalled,
    Stepped,
)
from millstream.retry import BackOff, Retry
from millstream.run.folder import FINISHED
from millstream.run.progress import finding_text
from millstream.run.tracking.config import AlertKind, AlertsConfig, public_url
from millstream.serving.router import DRAINED

logger = logging.getLogger(__name__)
BACK_OFF = BackOff(first_s=1.0, longest_s=10.0)
MAX_FAILURES = 3  # of one alert: four calls in all
FINISH_S = 30.0  # for what is left to be sent at the end
MAX_TEXT = 4096  # characters of an alert
LAST_WORDS_S = 1.0  # for the standard error of a command that has failed
DONE = (FINISHED, "Stopped", "KeyboardInterrupt")  # outcomes of a run that no error has ended


class Alert(Struct, frozen=True, kw_only=True):
    """The JSON that a command and a web hook get. `text` is for people: chat services show a field of this name."""

    kind: AlertKind
    name: str  # of the finding, of what stalls or has failed, or how the run ended
    text: str
    step: int
    seconds: float  # since the start of the run
    run: str  # its folder
    run_id: str
    host: str
    more: int = 0  # of this kind since the last one, which were not sent


class _Refused(Exception):
    """A call that will fail again in the same way."""


class AlertSink:
    """An event sink. Events wait until `start`."""

    def __init__(self, config: AlertsConfig, url: str | None) -> None:
        self._kinds = config.on
        self._step = 0
        self._ways: list[_Way] = []
        if config.command is not None:
            self._ways.append(_Command(config, config.command))
        if url is not None:
            self._ways.append(_WebHook(config, url))

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped | Resumed):
            self._step = event.version
        elif (found := _said(event)) is not None and found[0] in self._kinds:
            for way in self._ways:
                way.put(self._step, event)

    def start(self, folder: Path, run_id: str, warn: Callable[[str], None]) -> None:
        for way in self._ways:
            way.start(folder, run_id, warn)

    def finish(self) -> None:
        """Waits for what is left to be sent, for at most `FINISH_S`."""
        end = time.monotonic() + FINISH_S
        for way in self._ways:
            way.finish()
        for way in self._ways:
            way.wait(end)


class _Way:
    """The command or the web hook: its queue, and the thread that calls it."""

    name: str

    def __init__(self, config: AlertsConfig) -> None:
        self._timeout_s = config.timeout_s
        self._every_s = config.every_s
        self._events: queue.PriorityQueue[tuple[int, int, tuple[int, Event] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_finishing = threading.Event()

    def call(self, alert: Alert) -> None:
        """Blocks for at most `timeout_s`. Raises `TimeoutError`, `_Refused`, or another error if it failed."""
        raise NotImplementedError

    def put(self, step: int, event: Event) -> None:
        self._events.put((0 if isinstance(event, RunEnded) else 1, next(self._order), (step, event)))

    def start(self, folder: Path, run_id: str, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._run_id = run_id
        self._warn = warn
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self._is_finishing.set()
        self._events.put((2, next(self._order), None))

    def wait(self, end: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                logger.warning("alerts were not all sent after %g s: %s", FINISH_S, self.name)

    # ---- on the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        waiting: dict[AlertKind, list[Alert]] = {}  # by kind: the first, and how many there are
        next_at: dict[AlertKind, float] = {}
        while True:
            due = [next_at[kind] for kind in waiting]
            item, is_over = None, False
            with suppress(queue.Empty):
                _, _, item = self._events.get(timeout=max(0.0, min(due) - time.monotonic()) if due else None)
                is_over = item is None
            if item is not None:
                alert = self._alert(*item)
                waiting.setdefault(alert.kind, []).append(alert)
                if isinstance(item[1], RunEnded):
                    next_at[alert.kind] = 0.0
            for kind in list(waiting):
                if is_over or time.monotonic() >= next_at.get(kind, 0.0):
                    self._send(waiting.pop(kind))
                    next_at[kind] = time.monotonic() + self._every_s
            if is_over:
                return

    def _alert(self, step: int, event: Event) -> Alert:
        found = _said(event)
        assert found is not None
        kind, name, text = found
        return Alert(
            kind=kind,
            name=_sendable(name),
            text=_sendable(f"{self._folder.name}: {text}"),
            step=step,
            seconds=event.at,
            run=_sendable(str(self._folder)),
            run_id=self._run_id,
            host=socket.gethostname(),
        )

    def _send(self, alerts: list[Alert]) -> None:
        """The last of them, which says how many there were."""
        more = len(alerts) - 1
        text = f"{alerts[-1].text} ({more} more of this kind)" if more else alerts[-1].text
        alert = msgspec.structs.replace(alerts[-1], text=text, more=more)
        retry, rng = Retry(BACK_OFF, max_failures=MAX_FAILURES), random.Random()
        while True:
            try:
                self.call(alert)
                return
            except Exception as error:  # of a command or a server that is not ours: the run continues
                is_final = isinstance(error, _Refused) or (
                    isinstance(error, TimeoutError) and self._is_finishing.is_set()
                )
                wait_s = None if is_final else retry.failed(time.monotonic(), rng)
                if wait_s is None:
                    self._complain(f"{self.name} failed for an alert ({alert.kind} {alert.name}): {error}")
                    return
            if self._is_finishing.is_set():
                time.sleep(min(wait_s, 1.0))
            else:
                self._is_finishing.wait(wait_s)

    def _complain(self, message: str) -> None:
        if self._is_finishing.is_set():  # the log is closed
            logger.warning("%s", message)
        else:
            self._warn(message)


class _Command(_Way):
    def __init__(self, config: AlertsConfig, command: str) -> None:
        super().__init__(config)
        self._command = command
        self.name = f"alerts.command = {shown(command)!r}"

    def call(self, alert: Alert) -> None:
        fields = {
            "MILLSTREAM_ALERT": alert.kind,
            "MILLSTREAM_ALERT_NAME": alert.name,
            "MILLSTREAM_ALERT_TEXT": alert.text,
            "MILLSTREAM_STEP": str(alert.step),
            "MILLSTREAM_RUN": str(self._folder),
            "MILLSTREAM_RUN_ID": alert.run_id,
        }
        running = subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **{key: value.replace("\0", " ") for key, value in fields.items()}},
            start_new_session=True,  # Ctrl-C is for the run; and what it starts ends with it
        )
        said = bytearray()
        talking = threading.Thread(target=_talk, args=(running, msgspec.json.encode(alert), said), daemon=True)
        talking.start()
        try:
            running.wait(self._timeout_s)  # not for its pipes: a process that it leaves may hold them
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end after {self._timeout_s:g} s (alerts.timeout_s)") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        if running.returncode:
            talking.join(LAST_WORDS_S)
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise OSError(f"exit code {running.returncode}" + (f": {shown(last)}" if last else ""))


def _talk(running: subprocess.Popen[bytes], body: bytes, said: bytearray) -> None:
    """Writes its standard input, and keeps the end of its standard error."""
    assert running.stdin is not None and running.stderr is not None
    with suppress(OSError), running.stdin as stdin:  # it may read nothing
        stdin.write(body)
    with running.stderr as stderr:
        while part := os.read(stderr.fileno(), MAX_TEXT):
            said += part
            del said[:-MAX_TEXT]


class _WebHook(_Way):
    def __init__(self, config: AlertsConfig, url: str) -> None:
        super().__init__(config)
        self._url = url
        self.name = f"the web hook at {public_url(url)}"

    def call(self, alert: Alert) -> None:
        """Its errors have no URL: its path may be a secret."""
        import httpx2

        try:
            status = asyncio.run(self._post(msgspec.json.encode(alert)))
        except TimeoutError:
            raise TimeoutError(f"no answer after {self._timeout_s:g} s (alerts.timeout_s)") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConnectionError(f"{type(error).__name__}: {str(error).replace(self._url, 'the URL')}") from None
        if status >= 300:
            is_passing = status == 429 or status >= 500
            raise (ConnectionError if is_passing else _Refused)(f"status {status}")

    async def _post(self, body: bytes) -> int:
        """The status. The rest of the answer is not read."""
        import httpx2

        headers = {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self._timeout_s),
            httpx2.AsyncClient(timeout=None) as client,
            client.stream("POST", self._url, content=body, headers=headers) as answer,
        ):
            return answer.status_code


def _sendable(text: str) -> str:
    """Cut to what every system takes as an environment variable, and without what UTF-8 cannot have."""
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return cut.encode("utf-8", "replace").decode()


def _said(event: Event) -> tuple[AlertKind, str, str] | None:
    """The kind, the name and the text of an alert on this event; None: there is none."""
    match event:
        case FindingMade():
            return "finding", event.name, finding_text(event)
        case Stalled():
            done = "been blocked" if event.owner == EVENT_LOOP else "waited"
            by = "by" if event.owner == EVENT_LOOP else "for"
            return "stall", event.owner, f"{event.owner} has {done} {event.seconds:.0f} s {by} {event.what}"
        case ReplicaLeft() if event.why != DRAINED:
            return "failure", event.engine, f"{event.engine} has left: {event.why}; {event.num_left} engines serve"
        case LearnerRestarted():
            return "failure", event.who, f"{event.who} was restarted at step {event.to_version}: {event.why}"
        case CheckpointFailed():
            return "failure", "checkpoint", f"the checkpoint of step {event.version} failed: {event.message}"
        case RunEnded() if event.outcome in DONE:
            how = "finished" if event.outcome == DONE[0] else "was stopped"
            return "end", event.outcome, f"the run {how} at step {event.version}"
        case RunEnded():
            why = "" if event.message is UNSET else f": {event.message}"
            return "failure", event.outcome, f"the run ended at step {event.version} with {event.outcome}{why}"
    return None
