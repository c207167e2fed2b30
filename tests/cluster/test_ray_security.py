"""What listens: a run on this machine listens on loopback only, a connection without a ticket gets nothing, and no secret is
written to any file. `make test-ray`."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.events import WorkerStarted
from millstream.rpc.frames import frame
from millstream.store.wire import StoreHello, StoreRequest
from support.ray_runs import START_S, command, events_of, running, stop, tree_of
from support.runs import ROOT, assert_clean, steps_of, until

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

from millstream.cluster.actor import RayHello  # noqa: E402
from millstream.cluster.driver import HELLO_BYTES, ConnectionListener  # noqa: E402

LISTENING = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, the same as IPv6 has it, and ::1, as /proc writes them on a little-endian machine."""
SECRET = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""Tickets and tokens are 32 hexadecimal digits, which nothing else in a run is: digests have 64, ids 16."""


def listening(pids: Sequence[int]) -> dict[tuple[int, str, int], None]:
    """Process, address and port of everything that these processes listen on."""
    owners = dict[str, int]()
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    owners.setdefault(str(link.readlink()), pid)
    found = dict[tuple[int, str, int], None]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            owner = owners.get(f"socket:[{words[9]}]")
            if words[3] == LISTENING and owner is not None:
                address, port = words[1].split(":")
                found[owner, address, int(port, 16)] = None
    return found


def heard(port: int, said: bytes) -> bytes:
    """All that comes back until the connection is closed, or for two seconds."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as line, suppress(OSError):
        line.sendall(said)
        while data := line.recv(1 << 16):
            answer += data
    return answer


@pytest.fixture
def listener() -> Iterator[ConnectionListener]:
    made = ConnectionListener("127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize(
    "said",
    [
        frame(RayHello("0" * 32, 1, "a node")),
        frame({"ticket": "", "pid": 1, "node": ""}),
        frame(["no hello"]),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x05\0\0\0\xff\xff\xff\xff\xff",
        (1 << 30).to_bytes(4, "little") + b"x" * (HELLO_BYTES + 1),
    ],
    ids=["a wrong ticket", "none", "another message", "HTTP", "no message", "one without end"],
)
def test_a_connection_without_a_ticket_gets_nothing_and_disturbs_no_other(
    listener: ConnectionListener, said: bytes
) -> None:
    connected = listener.expect("1" * 32)
    assert heard(listener.port, said) == b""
    assert not connected.done()
    with socket.create_connection(("127.0.0.1", listener.port)) as line:
        line.sendall(frame(RayHello("1" * 32, 7, "a node")))
        ours, hello = connected.result(timeout=10)
        ours.sendall(b"welcome")
        assert hello.pid == 7 and line.recv(16) == b"welcome"
        ours.close()


def test_a_ticket_is_valid_once(listener: ConnectionListener) -> None:
    connected, said = listener.expect("1" * 32), frame(RayHello("1" * 32, 7, "a node"))
    with socket.create_connection(("127.0.0.1", listener.port)) as line:
        line.sendall(said)
        connected.result(timeout=10)[0].close()
    assert heard(listener.port, said) == b""


def test_a_run_on_this_machine_listens_on_loopback_only_and_writes_no_secret(tmp_path: Path) -> None:
    """Also: a wrong ticket or token gets nothing on any port of an active run, and the run continues."""
    run_dir = tmp_path / "run"
    with running(command(run_dir, {"pipeline.steps": 100_000})) as process:
        until(lambda: steps_of(run_dir) >= 2, process, START_S)
        doors = listening(tree_of(process.pid))
        ours = {event.pid for event in events_of(run_dir) if isinstance(event, WorkerStarted)} | {process.pid}
        assert {owner for owner, _, _ in doors} >= ours, "every part of it is looked at"
        assert [door for door in doors if door[1] not in LOOPBACK] == []
        refusals = 0
        for owner, _, port in doors:
            if owner not in ours:
                continue  # of Ray itself
            stranger = StoreHello("a stranger", "0" * 32, "a node", None, [])
            for said in (
                frame(StoreRequest(0, [], stranger)),
                frame(RayHello("0" * 32, 1, "a node")),
                b"0" * 32 + b" 1-1\n",
            ):
                answer = heard(port, said)
                refusals += b"token is not that of this store" in answer
                assert len(answer) < 200, "more than a refusal"
        assert refusals == 1, "that of the store's coordinator"
        steps = steps_of(run_dir)
        until(lambda: steps_of(run_dir) > steps, process)
        output = stop(process)
    assert SECRET.search(output.encode()) is None
    read = [path for path in run_dir.rglob("*") if path.suffix in (".jsonl", ".toml", ".json", ".txt")]
    assert {"events.jsonl", "metrics.jsonl", "config.toml"} <= {path.name for path in read}
    assert [path.name for path in read if SECRET.search(path.read_bytes())] == []
    assert_clean(run_dir)


def test_nothing_of_ours_unpickles() -> None:
    """What is pickled is Ray's, within the cluster. A learner's state is torch's, read with `weights_only`, and what describes
    its shards by an unpickler that knows the few names of such a description and refuses all others (`test_export.py`)."""
    uses = subprocess.run(
        [
            "grep",
            "-rnE",
            r"pickle\.(loads?|Unpickler)|allow_pickle=True|weights_only=False|marshal\.load|import dill",
            "src",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert [line.split(":", 2)[::2] for line in uses.stdout.splitlines()] == [
        ["src/millstream/learner/shards.py", "class RestrictedUnpickler(pickle.Unpickler):"],
    ]
