"""The sandbox for commands: what is left after a kill -9, how it is lost, and every escape that was thought of, tried from a shell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import millstream
from millstream.env.sandbox import walled
from millstream.env.sandbox.base import Executed, Limits
from millstream.env.sandbox.inside import commands
from millstream.env.sandbox.keepers import SandboxBroken, Walls
from millstream.env.sandbox.programs import what_is_contained
from millstream.env.sandbox.walled import WalledSandbox, check_walls
from millstream.errors import ConfigError, SandboxLost

HOLDER = Path(__file__).parents[1] / "support/sandbox_holder.py"
LIMITS = Limits(wall_s=60.0, memory_bytes=256 << 20, scratch_bytes=8 << 20, file_bytes=8 << 20, processes=24)


def run(program: Callable[[WalledSandbox], Awaitable[Any]], limits: Limits = LIMITS, walls: Walls | None = None) -> Any:
    async def whole() -> Any:
        sandbox = WalledSandbox(limits, walls=walls)
        try:
            await sandbox.start()
            return await program(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(whole())


def named(name: str) -> list[str]:
    """Processes on this machine with this command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found += [entry.name] if (entry / "comm").read_text().strip() == name else []
            except OSError:
                continue
    return found


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := is_so()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


# ---- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["the run", "the keepers"])
def test_after_a_kill_9_no_process_file_or_mount_is_left(victim: str, tmp_path: Path) -> None:
    name = f"left{secrets.token_hex(4)}"
    mounts = Path("/proc/mounts").read_text()
    package = str(Path(millstream.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(HOLDER), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        keepers = [int(word) for word in holder.stdout.readline().split()]
        assert len(keepers) == 3 and len(named(name)) >= 6
        holder.send_signal(signal.SIGSTOP)  # or it would see the first keeper die, and end the others by itself
        for process in [holder.pid] if victim == "the run" else keepers:
            os.kill(process, signal.SIGKILL)
        holder.send_signal(signal.SIGCONT)
        gone = until(lambda: not named(name))
        holder.kill()
    assert gone and until(lambda: not any(Path(f"/proc/{keeper}").exists() for keeper in keepers))
    assert Path("/proc/mounts").read_text() == mounts and list(tmp_path.iterdir()) == []


def test_a_sandbox_whose_keeper_is_killed_is_lost_by_name_also_in_the_middle_of_a_command() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        running = asyncio.create_task(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.2)
        assert sandbox.keeper_id is not None
        os.kill(sandbox.keeper_id, signal.SIGKILL)
        with pytest.raises(SandboxLost, match=r"the sandbox is gone: .* was killed"):
            await running
        for again in (sandbox.exec("true"), sandbox.read("a"), sandbox.start()):
            with pytest.raises(SandboxLost):
                await again

    run(program)


def test_a_sandbox_past_its_lifetime_is_lost_by_name() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        with pytest.raises(SandboxLost, match=r"its lifetime of 0\.5 s is over"):
            for _ in range(100):
                await sandbox.exec("sleep 0.2")

    run(program, structs.replace(LIMITS, lifetime_s=0.5))


def test_a_sandbox_that_is_started_again_has_its_whole_lifetime() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        for _ in range(4):
            await sandbox.exec("sleep 0.5")
            await sandbox.start()

    run(program, structs.replace(LIMITS, lifetime_s=1.5))


def test_a_snapshot_of_a_folder_that_a_process_writes_is_whole() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        await sandbox.exec("(while true; do echo x >> log; echo y > other; rm other; done) >/dev/null 2>&1 &")
        for _ in range(3):
            snapshot = await sandbox.snapshot()
        await sandbox.start(snapshot)
        assert set((await sandbox.read("log")).split()) <= {b"x"}

    run(program)


FORGER = """
import os
while True:
    for name in os.listdir('/proc'):
        if name.isdecimal() and int(name) not in (1, os.getpid()):
            try:
                file = os.open(f'/proc/{name}/fd/1', os.O_WRONLY | os.O_NONBLOCK)
                os.write(file, b'forged')
                os.close(file)
            except OSError: pass
"""


def test_what_a_process_in_the_background_prints_into_other_commands_ends_with_a_start_from_a_snapshot() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        await sandbox.write("forger.py", FORGER.encode())
        await sandbox.write("data", bytes(4 << 20))
        await sandbox.exec("python forger.py >/dev/null 2>&1 &")
        while b"forged" not in (await sandbox.exec("sleep 0.2")).output:
            pass
        assert await sandbox.read("data") == bytes(4 << 20)
        await sandbox.start(await sandbox.snapshot())
        assert (await sandbox.exec("sleep 0.2; ls")).output == b"data\nforger.py\n"

    run(program)


def test_a_snapshot_of_folders_that_are_too_deep_fails_by_name() -> None:
    deep = "import os\nfor n in range(1500): os.mkdir('d'); os.chdir('d')"

    async def program(sandbox: WalledSandbox) -> None:
        assert (await sandbox.exec(f'python -c "{deep}"')).code == 0
        with pytest.raises(OSError, match="too long"):
            await sandbox.snapshot()
        with pytest.raises(OSError, match="too long"):
            await sandbox.write("p" * 5_000_000, b"")
        await sandbox.start()
        assert (await sandbox.exec("ls -A")).output == b""

    run(program)


def test_a_process_whose_parent_has_ended_is_reaped_while_the_command_runs() -> None:
    orphan = "sh -c 'true & echo $! > id'; while test -d /proc/$(cat id); do sleep 0.05; done"
    done: Executed = run(lambda sandbox: sandbox.exec(orphan, timeout_s=20.0))
    assert (done.how, done.code) == ("ended", 0), done


def test_a_command_that_has_ended_and_printed_too_much_leaves_no_process() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        running = asyncio.create_task(sandbox.exec("sleep 50 >/dev/null 2>&1 & head -c 2000 /dev/zero"))
        for _ in range(10):
            await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251  it ends before anything is read
        assert (await running).how == "output"
        assert (await sandbox.exec("cat /proc/[0-9]*/comm | grep sleep")).output == b""

    run(program, structs.replace(LIMITS, output_bytes=1000))


# ---- escapes ---------------------------------------------------------------------------------------------------------------

ESCAPES = {
    "write outside": "echo x > /OUTSIDE || echo x > /usr/x || echo x > /etc/x || mkdir /new || touch /proc/sys/kernel/hostname",
    "read the home folder": "ls HOME/.bashrc HOME/.ssh HOME/.profile || cat /etc/shadow || ls /OUTSIDE",
    "leave by a process": "ls /proc/1/root/ /proc/1/cwd/ || cat /proc/1/environ || ls -l /proc/1/fd",
    "read our variables": "cat /proc/*/environ | tr '\\0' '\\n' | grep SECRET_OF_THE_TEST || env | grep SECRET_OF_THE_TEST",
    "signal our process": "kill -0 PID || kill -9 PID",
    "signal its first process": "kill -INT 1; sleep 0.2; kill -9 1; kill -STOP 1; kill -TERM 1; ! test -d /proc/1",
    "reach our server": "exec 3<>/dev/tcp/127.0.0.1/PORT",
    "reach a socket of our machine": "python -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0x\")'",
    "mount": "mount -t tmpfs none /scratch || unshare -Urm true || unshare -n true",
    "remount": "mount -o remount,rw / || mount -o remount,size=1g /scratch",
    "become another user": "su -c true || sudo -n true || python -c 'import os; os.setuid(int(not os.getuid()))'",
    "make a device": "mknod disk b 8 0 && head -c 1 disk",
    "trace the first process": "python -c 'import ctypes; raise SystemExit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)'",
    "read the kernel's log": "dmesg || cat /dev/kmsg",
    "raise its limits": "ulimit -t unlimited || ulimit -u 10000 || ulimit -v unlimited",
    "find our processes": "ls /proc | grep -x PID",
}


@pytest.mark.parametrize("walls", ["root", "user"])
@pytest.mark.parametrize("name", ESCAPES)
def test_a_command_cannot(name: str, walls: Walls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        what_is_contained(walls)
    except SandboxBroken as error:
        pytest.skip(f"walls {walls!r} cannot be had here: {error}")
    monkeypatch.setenv("SECRET_OF_THE_TEST", "SECRET_OF_THE_TEST=1")
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {
            "OUTSIDE": f"{tmp_path}/x",
            "HOME": str(Path.home()),
            "PID": os.getpid(),
            "PORT": server.getsockname()[1],
        }
        command = ESCAPES[name]
        for word, value in words.items():
            command = command.replace(word, str(value))
        tried = f"({command}) >out 2>&1 || {{ cat out; exit 77; }}"
        done: Executed = run(lambda sandbox: sandbox.exec(tried), walls=walls)
    assert (done.how, done.code) == ("ended", 77), done
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_exhausted_kills_the_commands_and_nothing_else() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        hog = "python -c 'x = bytearray(90 << 20); import time; time.sleep(60)'"
        done = await sandbox.exec(f"touch kept; {hog} & {hog} & {hog} & {hog} & wait; sleep 60")
        assert done.how == "memory"
        assert (await sandbox.exec("ls")).output == b"kept\n"

    run(program)


def test_processes_in_the_background_are_limited_between_commands() -> None:
    async def program(sandbox: WalledSandbox) -> None:
        await sandbox.exec("(:(){ :|:& };:) >/dev/null 2>&1 &", timeout_s=5.0)
        await asyncio.sleep(0.3)
        done = await sandbox.exec("echo well", timeout_s=2.0)
        if done.output != b"well\n":  # no process was left for it: then all were killed
            assert done.how in ("processes", "time")
            assert (await sandbox.exec("echo well")).output == b"well\n"

    run(program)


def test_a_link_to_outside_leads_to_a_place_in_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o666)
    tmp_path.chmod(0o777)

    async def program(sandbox: WalledSandbox) -> None:
        await sandbox.exec(f"ln -s {tmp_path}/secret link; ln -s {tmp_path} folder; mkfifo pipe")
        for path in ("link", "folder/secret", f"../..{tmp_path}/secret", "pipe", "", "a\0b"):
            with pytest.raises(OSError):
                await sandbox.read(path)
        for path in ("link", "folder/new", f"{tmp_path}/new"):
            with contextlib.suppress(OSError):  # or it is written below the sandbox's own /tmp
                await sandbox.write(path, b"changed")
        with pytest.raises(OSError):
            await sandbox.write("pipe", b"changed")

    run(program)
    assert (tmp_path / "secret").read_text() == "secret" and not (tmp_path / "new").exists()


def test_a_sandbox_without_namespaces_does_not_start() -> None:
    with pytest.raises(SandboxLost, match="no namespaces"):
        run(lambda sandbox: sandbox.exec("true"), walls="none")


def test_the_first_process_refuses_to_serve_where_it_is_not_alone() -> None:
    with pytest.raises(OSError, match="killing all would kill others"):
        commands._confine({"walls": "none", "limits": {}}, keeper=1)


def test_without_namespaces_the_sandbox_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    contained = structs.replace(walled.what_is_contained(), walls="none")

    def found(walls: str | None = None) -> Any:
        if walls == "user":
            raise SandboxBroken("the sandbox cannot be set up: unshare: Operation not permitted")
        return contained

    monkeypatch.setattr(walled, "what_is_contained", found)
    check_walls.cache_clear()
    with pytest.raises(ConfigError, match=r"Operation not permitted.*sysctl -w user.max_user_namespaces.*docker"):
        check_walls()
    monkeypatch.setattr(walled, "what_is_contained", lambda: structs.replace(contained, walls="user", network=False))
    with pytest.raises(ConfigError, match="not contained: network"):
        check_walls()
