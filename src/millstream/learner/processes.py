"""The learner's worker processes as groups: ranks that share one policy, one scorer or one critic.

A group (`rpc.group`) answers every call with all of its members or fails as a whole. Here its error is `LearnerGone` if a
process died, or if the ranks lost each other: new processes may succeed. It is `LearnerError` if a worker refused, which it
would do again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import structs
from torch._C._distributed_c10d import TCPStore

from millstream.errors import LearnerError, LearnerGone, WorkerError, WorkerExited
from millstream.learner.messages import RankPlace, ShareSetup, WriteSnapshot
from millstream.learner.snapshots import check_files
from millstream.rpc.call import Remote
from millstream.rpc.group import WorkerGroup
from millstream.rpc.process import Kind, Launcher, WorkerProcess, rank_name

RANK_WORKER = "millstream.learner.rank_worker:serve_rank"
LOOPBACK = "127.0.0.1"
COLLECTIVE_ERRORS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class LearnerProcesses(WorkerGroup):
    """`who`: the group in words ("the learner")."""

    def __init__(self, members: Sequence[Remote], *, who: str) -> None:
        super().__init__(members, who=who, make_error=_error, is_echo=_is_echo)


def _error(message: str, may_heal: bool) -> LearnerError:
    return LearnerGone(message) if may_heal else LearnerError(message)


def _is_echo(error: Exception) -> bool:
    """A collective that failed because another rank is gone."""
    text = str(error)
    is_runtime_error = text.startswith(("RuntimeError", "Dist"))  # torch's DistBackendError and others
    is_raised = isinstance(error, WorkerError) and not isinstance(error, WorkerExited)
    return is_raised and is_runtime_error and any(word in text.lower() for word in COLLECTIVE_ERRORS)


class RankProcesses(LearnerProcesses):
    """The processes that have one model, and, of several, the `TCPStore` through which they join each other. Each is launched
    under its name in `names`; `who`: all of them in words."""

    def __init__(
        self,
        setup: ShareSetup,
        launcher: Launcher,
        names: Sequence[str],
        *,
        kind: Kind,
        target: str,
        who: str,
        host: str = LOOPBACK,
    ) -> None:
        """`host`: the address of this machine that all ranks can reach."""
        num = len(names)
        self._store = None if num == 1 else _open_store(host, num)
        port = 0 if self._store is None else self._store.port
        members = []
        for rank, name in enumerate(names):
            memory = None if setup.memory is None else os.dup(setup.memory)
            own = structs.replace(setup, place=RankPlace(rank=rank, num_ranks=num, host=host, port=port), memory=memory)
            launch = partial(_launch, launcher, kind, target, name, memory)
            members.append(Remote(launch, own, name=name if name in who else f"rank {rank} of {num}"))
        super().__init__(members, who=who)


def learner_ranks(setup: ShareSetup, num_ranks: int, launcher: Launcher, *, host: str = LOOPBACK) -> RankProcesses:
    names = [rank_name(rank) for rank in range(num_ranks)]
    return RankProcesses(setup, launcher, names, kind="learner", target=RANK_WORKER, who="the learner", host=host)


def _open_store(host: str, num_ranks: int) -> TCPStore:
    listener = socket.create_server((host, 0))  # on this address alone: the store by itself would take all
    return TCPStore(
        host,
        listener.getsockname()[1],
        num_ranks + 1,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def _launch(launcher: Launcher, kind: Kind, target: str, name: str, memory: int | None) -> WorkerProcess:
    """The process inherits the memory's descriptor; ours is closed."""
    try:
        return launcher.launch(kind, target, name=name, descriptors=() if memory is None else (memory,))
    finally:
        if memory is not None:
            os.close(memory)


class GroupSnapshot:
    """A `Snapshot` (`learner.base`) of which each member keeps its part until it is written."""

    def __init__(self, group: WorkerGroup, number: int) -> None:
        self._group = group
        self._number = number

    def write(self, folder: Path) -> None:
        """Raises `OSError` if the disk refuses: the group is as it was."""
        message = WriteSnapshot(self._number, str(folder.absolute()))
        written: list[dict[str, int]] = self._group.call(message, dict[str, int], harmless=(OSError,))
        check_files(folder, dict(zip(self._group.places, written, strict=True)))
