"""Two Ray nodes on one machine with a network between them that can be cut: each has a network namespace, a third one is the
switch. Only root may make those."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEAD, WORKER = "10.213.0.1", "10.213.0.2"
PORT = 6399
MEMORY = 100 << 20
REACHED_S = 30.0


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


class TwoNodes:
    """`head` and `worker` are namespaces."""

    address = f"{HEAD}:{PORT}"

    def __init__(self) -> None:
        self.head, self.worker, self._switch = (f"ms-{os.getpid()}-{end}" for end in "hws")
        self._folder = tempfile.mkdtemp(prefix="ms-ray-", dir="/tmp")

    def wire(self) -> None:
        for space in (self.head, self.worker, self._switch):
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
        ip(f"-n {self._switch} link add hub type bridge")
        ip(f"-n {self._switch} link set hub up")
        for space, address, end in ((self.head, HEAD, "h"), (self.worker, WORKER, "w")):
            ip(f"-n {space} link add net0 type veth peer name to-{end} netns {self._switch}")
            ip(f"-n {space} addr add {address}/24 dev net0")
            ip(f"-n {space} link set net0 up")
            ip(f"-n {self._switch} link set to-{end} master hub")
            ip(f"-n {self._switch} link set to-{end} up")

    def start(self, *, head_cpus: int, worker_cpus: int) -> None:
        common = ["--object-store-memory", str(MEMORY), "--disable-usage-stats"]
        head = ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", self._folder]
        self._ray(self.head, [*head, f"--node-ip-address={HEAD}", "--num-cpus", str(head_cpus), *common])
        self._until_reached()
        joining = [f"--address={self.address}", f"--node-ip-address={WORKER}", "--num-cpus", str(worker_cpus)]
        self._ray(self.worker, [*joining, *common])

    def _until_reached(self) -> None:
        """A switch that was just made may lose what comes first."""
        program = f"import socket; socket.create_connection({(HEAD, PORT)!r}, 2).close()"
        deadline = time.monotonic() + REACHED_S
        words = self.within(self.worker, [sys.executable, "-c", program])
        while (tried := subprocess.run(words, capture_output=True, text=True)).returncode:
            assert time.monotonic() < deadline, tried.stderr
            time.sleep(0.2)

    def _ray(self, space: str, words: list[str]) -> None:
        ray = [str(Path(sys.executable).with_name("ray")), "start", *words]
        own = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}  # a driver in this process has set it to 0
        done = subprocess.run(self.within(space, ray), capture_output=True, text=True, timeout=120, env=own)
        assert done.returncode == 0, done.stdout + done.stderr

    def within(self, space: str, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", space, *words]

    def cut(self) -> None:
        """Whatever is on its way is lost, and neither end is told."""
        ip(f"-n {self._switch} link set to-w down")

    def mend(self) -> None:
        ip(f"-n {self._switch} link set to-w up")

    def remove(self) -> None:
        for space in (self.head, self.worker, self._switch):
            found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-KILL", pid], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
        shutil.rmtree(self._folder, ignore_errors=True)


def may_be_made() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"ms-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


@contextmanager
def two_nodes(*, head_cpus: int, worker_cpus: int) -> Iterator[TwoNodes]:
    nodes = TwoNodes()
    try:
        nodes.wire()
        nodes.start(head_cpus=head_cpus, worker_cpus=worker_cpus)
        yield nodes
    finally:
        nodes.remove()
