"""Several workers that act as one: every call goes to all members, in the same order, and all of them answer it or none does.

A member that dies or raises ends the group within seconds, because the others may wait for what it will never do. The error
names the member that failed first: a death explains every other failure, and a failure that is only the echo of another
member's (a broken collective) is named last. No process outlives the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple

from millstream.errors import MillstreamError, WorkerExited
from millstream.rpc.call import CLOSE_S, Remote

SETTLE_S = 1.0  # after the first failure: time for the member that began it to be noticed


class MemberFailure(NamedTuple):
    member: Remote
    error: Exception

    @property
    def is_death(self) -> bool:
        """Its process could not be started, was killed or crashed: another one might do better."""
        return isinstance(self.error, WorkerExited) and self.error.is_death


class WorkerGroup:
    """Started, perhaps not yet ready: the first call waits for that. May be used from several threads."""

    def __init__(
        self,
        members: Sequence[Remote],
        *,
        who: str,
        make_error: Callable[[str, bool], MillstreamError],
        is_echo: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        """`who`: the group in words ("the learner"). `make_error(message, may_heal)`: the error that calls raise; `may_heal`: a
        new group might succeed where this one failed. `is_echo`: whether an error only reports that another member failed."""
        self.members = members
        self._who = who
        self._make_error = make_error
        self._is_echo = is_echo
        self._failures: list[MemberFailure] = []
        self._lock = threading.Lock()
        self._error: MillstreamError | None = None
        self._is_ready = False
        for member in members:
            self._note_failures(member, member.ready)

    @property
    def pids(self) -> list[int]:
        """Of the members whose process exists."""
        return [member.process.pid for member in self.members if member.process is not None]

    @property
    def places(self) -> list[str]:
        """Each member in words, with its node where nodes have names."""
        nodes = ["" if member.process is None else member.process.node for member in self.members]
        names = [member.name for member in self.members]
        return [name + (f" on node {node}" if node else "") for name, node in zip(names, nodes, strict=True)]

    def wait(self) -> None:
        """Until all are ready. Raises as `call` does."""
        if not self._is_ready:
            self._results([member.ready for member in self.members], ())
            self._is_ready = True

    def call(self, messages: Any, answer: Any = None, *, harmless: tuple[type[Exception], ...] = ()) -> list[Any]:
        """One message for all, or a sequence of one for each; the answers, in the order of the members. If any member failed,
        raises what `make_error` makes: then all are ended, and every later call fails the same way. An error of a `harmless`
        type is raised as it is, and changes nothing."""
        each = messages if isinstance(messages, Sequence) else [messages] * len(self.members)
        with self._lock:  # all members get calls in the same order
            self._raise_if_failed()
            answers = [member.call(message, answer) for member, message in zip(self.members, each, strict=True)]
        self.wait()
        for member, future in zip(self.members, answers, strict=True):
            self._note_failures(member, future, harmless)
        return self._results(answers, harmless)

    def _note_failures(self, member: Remote, future: Future[Any], harmless: tuple[type[Exception], ...] = ()) -> None:
        def note(done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, Exception) and not isinstance(error, harmless):
                self._failures.append(MemberFailure(member, error))

        future.add_done_callback(note)

    def _results(self, answers: Sequence[Future[Any]], harmless: tuple[type[Exception], ...]) -> list[Any]:
        members = list(zip(self.members, answers, strict=True))
        done, waiting = set[Future[Any]](), set(answers)
        while waiting:
            some, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            done |= some
            pairs = [(member, answer.exception()) for member, answer in members if answer in some]
            failed = [MemberFailure(m, e) for m, e in pairs if isinstance(e, Exception) and not isinstance(e, harmless)]
            if failed:
                self._fail(failed)
        return [answer.result() for answer in answers]

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _fail(self, failed: Sequence[MemberFailure]) -> None:
        """`failed`: what the caller has seen; whether it is in `_failures` yet is open."""
        deadline = time.monotonic() + SETTLE_S
        while not self._is_cause_known(failed) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._error = self._error or self._cause([*self._failures, *failed])
        self.kill()
        self._raise_if_failed()

    def _is_cause_known(self, failed: Sequence[MemberFailure]) -> bool:
        """A single member's first failure is the cause; of several, only a death is sure to be."""
        return len(self.members) == 1 or any(failure.is_death for failure in [*self._failures, *failed])

    def _cause(self, failures: Sequence[MemberFailure]) -> MillstreamError:
        own = [failure for failure in failures if not self._is_echo(failure.error)]
        deaths = [failure for failure in own if failure.is_death]
        first = [*deaths, *own, *failures][0]
        may_heal = bool(deaths) or not own
        place = "" if first.member.name in self._who else f", {first.member.name}"
        return self._make_error(f"{self._who} broke{place}: {first.error}", may_heal)

    def kill(self) -> None:
        """No process is left when it returns."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.close()

    def close(self) -> None:
        """Let every member finish the call in hand, for a while. No process is left when it returns."""
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            self._error = self._error or self._make_error(f"{self._who} is closed", False)
        for member in self.members:
            member.begin_close()
        for member in self.members:
            member.close(max(0.0, deadline - time.monotonic()))
