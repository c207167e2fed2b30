"""Escapes: programs that try to reach, keep or use what they may not, behind every kind of walls, as root, as root without the right
to make namespaces, and as an ordinary user.

None does harm where it succeeds: what it changes, it sets to the value that is there.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import boxes
from support.box_driver import ORDINARY
from support.commands import start_command

# What each tries: statements that raise OSError where they fail. PID: a process of the user who runs the sandbox. FILE: a file that
# all may write to, in a folder that all may write to.
CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndef call(*given):\n    if libc.syscall(*given) < 0: raise OSError\n"
OPENS = "os.close(os.open({path!r}, os.O_WRONLY))"
ESCAPES: dict[str, str] = {
    "set a kernel's pattern for cores": OPENS.format(path="/proc/sys/kernel/core_pattern"),
    "set a kernel's limit": OPENS.format(path="/proc/sys/kernel/pid_max"),
    "set how memory is promised": OPENS.format(path="/proc/sys/vm/overcommit_memory"),
    "set the host's name": OPENS.format(path="/proc/sys/kernel/hostname"),
    "press a key of the kernel": OPENS.format(path="/proc/sysrq-trigger"),
    "set an interrupt": "n = sorted(os.listdir('/proc/irq'))[0]\nos.close(os.open(f'/proc/irq/{n}/smp_affinity', os.O_WRONLY))",
    "write to a file": "open('FILE', 'a').close()",
    "truncate a file": "os.truncate('FILE', 4)",
    "rename a file": "os.rename('FILE', 'FILE-new')",
    "make a file beside it": "open('FILE-new', 'w').close()",
    "make a link to it": "os.link('FILE', 'link')",
    "change a file's rights": "os.chmod('FILE', 0o666)",
    "change a file's rights by a descriptor": "os.fchmod(os.open(os.__file__, os.O_RDONLY), os.stat(os.__file__).st_mode & 0o777)",
    "change a file's times": "os.utime('FILE', (0, 0))",
    "change a file's owner": "os.chown('FILE', os.getuid(), -1)",
    "give a file an attribute": "os.setxattr('FILE', 'user.x', b'')",
    "change a device's rights": "os.chmod('/dev/null', 0o666)",
    "make a device": "os.mknod('null', 0o666 | 0o020000, os.makedev(1, 3))",
    "change the root": "os.chroot('.')",
    "leave the root": "open('/proc/1/root' + 'FILE').close()",
    "limit our process": "import resource\nresource.prlimit(PID, resource.RLIMIT_CORE, resource.prlimit(PID, resource.RLIMIT_CORE))",
    "move our process to a core": "os.sched_setaffinity(PID, os.sched_getaffinity(0))",
    "schedule our process": "os.sched_setscheduler(PID, os.SCHED_OTHER, os.sched_param(0))",
    "slow our process down": "os.setpriority(os.PRIO_PROCESS, PID, os.getpriority(os.PRIO_PROCESS, PID))",
    "run before all others": "os.nice(-5)",
    "signal our process": "os.kill(PID, 0)",
    "signal our process by a descriptor": "import signal\nsignal.pidfd_send_signal(os.pidfd_open(PID), 0)",
    "have a pipe signal our process": (
        "import fcntl, signal\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, PID)\nfcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGKILL)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\n1 / 0"
    ),
    "trace our process": CALL + "if libc.ptrace(0x4206, PID, 0, 0) < 0: raise OSError",
    "read our memory": "open('/proc/PID/mem', 'rb').close()",
    "read our descriptors": "os.listdir('/proc/PID/fd')",
    "have a queue of System V": CALL + "if libc.msgget(0x6d73, 0o1666) < 0: raise OSError",
    "have semaphores of System V": CALL + "if libc.semget(0x6d73, 1, 0o1666) < 0: raise OSError",
    "have memory of System V": CALL + "if libc.shmget(0x6d73, 4096, 0o1666) < 0: raise OSError",
    "have a queue of messages": "import ctypes.util\n"
    + CALL
    + "if libc.mq_open(b'/box', 0o102, 0o666, None) < 0: raise OSError",
    "have a file of memory": "os.memfd_create('x')",
    "open a socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "have keys of the kernel": CALL
    + "import platform\ncall({'x86_64': 250, 'aarch64': 219}[platform.machine()], 1, 0)",
    "have a namespace of users": CALL + "if libc.unshare(0x10000000) < 0: raise OSError",
    "give itself rights": "os.setresuid(0, 0, 0) if os.getuid() else os.setresuid(1, 1, 1)",
    "not be the kernel's first victim": "open('/proc/self/oom_score_adj', 'w').write('0')",
    "raise its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
}
TRIES = """
import json, os
found = {}
for name, tried in ESCAPES:
    try:
        exec(tried, {"os": os})
        found[name] = "ESCAPED"
    except (OSError, ValueError, ZeroDivisionError) as error:
        pass
    except Exception as error:
        found[name] = repr(error)
print(json.dumps(found))
"""
# What a program leaves behind, or uses too much of: the program, and how it ends.
CHILDREN = """
import os, time
for _ in range(10):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        time.sleep(60)
time.sleep(60)
"""
HIDDEN_CHILDREN = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + CHILDREN
SHARED = """
import mmap, os, time
maps = []
for _ in range(3):
    maps.append(mmap.mmap(-1, 40 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    maps[-1].write(b"x" * (40 << 20))
for _ in range(6):
    if os.fork() == 0:
        sum(m[n] for m in maps for n in range(0, len(m), 4096))
        time.sleep(0.5)
        os._exit(0)
for _ in range(6): os.wait()
print("well")
"""
FILES = "import time\nfor n in range(20_000): open(str(n), 'w').close()\ntime.sleep(60)"
DELETED = """
import os, time
held = []
for n in range(20):
    held.append(open(str(n), "wb", buffering=0))
    held[-1].write(bytes(1 << 20))
    os.unlink(str(n))
time.sleep(60)
"""
DEEP = "import os\nfor n in range(3000):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
UNREADABLE = """
import os
for name in "abc":
    os.mkdir(name, 0o700)
    for inner in range(3): open(f"{name}/{inner}", "w").close()
    os.makedirs(f"{name}/x/y")
os.mkdir("closed", 0)
os.mkdir("write only", 0o300)
open("write only/file", "w").close()
os.mkdir("write only/inner", 0o100)
os.symlink("/etc", "link")
try: os.chmod(".", 0); os.chmod("a", 0)
except OSError: pass
"""
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
USES: dict[str, tuple[str, str]] = {
    "ten children hold too much": (CHILDREN, "memory"),
    "children that cannot be looked into hold too much": (HIDDEN_CHILDREN, "memory"),
    "twenty thousand files": (FILES, "disk"),
    "files without a name": (DELETED, "disk"),
    "folders deeper than any path": (DEEP, "ended"),
    "folders that cannot be read": (UNREADABLE, "ended"),
    "a fork bomb": (BOMB, "processes"),
    "children that share what they hold": (SHARED, "ended"),
}
FIXED_USES = ("ten children hold too much", "folders that cannot be read", "a fork bomb")


@pytest.fixture(scope="module")
def target() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="millstream-escape-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret").write_text("text")
        (folder / "secret").chmod(0o666)
        yield folder / "secret"


@pytest.mark.parametrize(("identity", "walls"), (*boxes.PLACES, *boxes.MORE_PLACES))
def test_no_escape_succeeds(identity: str, walls: str, target: Path) -> None:
    if os.geteuid() == 0:
        os.chown(target, *(2 * [ORDINARY if identity == "user" else 0]))
    (ran,) = boxes.drive(
        identity,
        walls,
        [{"program": TRIES.replace("ESCAPES", repr(list(ESCAPES.items()))).replace("FILE", str(target))}],
    )
    assert ran["output"] == "{}\n", ran
    assert target.read_text() == "text" and [entry.name for entry in target.parent.iterdir()] == [target.name]
    for kind in ("msg", "sem", "shm"):
        assert str(0x6D73) not in Path(f"/proc/sysvipc/{kind}").read_text().split()


@functools.cache
def uses(identity: str, walls: str, is_fixed: bool) -> tuple[dict[str, Any], set[str]]:
    """How each program has ended, and what is left of all of them."""
    names = [name for name in USES if (name in FIXED_USES) == is_fixed]
    before = scratch_folders()
    limits = {name: {**boxes.LIMITS, "wall_s": 2.0 if name == "a fork bomb" else 60.0} for name in names}
    jobs = [{"program": USES[name][0], "limits": limits[name]} for name in names]
    answers = boxes.drive(identity, walls, jobs, at_once=1)
    return dict(zip(names, answers, strict=True)), scratch_folders() - before


def scratch_folders() -> set[str]:
    return {entry.name for entry in Path(tempfile.gettempdir()).glob("millstream-sandbox-*")}


@pytest.mark.parametrize(("identity", "walls", "use"), boxes.cases(USES, FIXED_USES))
def test_what_a_program_uses_is_limited_in_all_its_processes_and_nothing_is_left(
    identity: str, walls: str, use: str
) -> None:
    found, left = uses(identity, walls, use in FIXED_USES)
    ran, expected = found[use], USES[use][1]
    is_full = walls != "none" and expected == "disk" and "No space left" in ran["errors"]  # the kernel's limit
    is_counted = use == "a fork bomb" and ran["how"] == "time"  # by the kernel
    assert ran["how"] == expected or is_full or is_counted, ran
    assert ran["is_clean"] and left == set()
    if use == "children that share what they hold":
        assert ran["output"] == "well\n"


WITHOUT_WALLS = """
import sys
from millstream.env.sandbox.inside import syscalls
syscalls.seccomp(("unshare", "landlock_create_ruleset"))
from millstream.cli.main import app
for options in ([], ["--dry-run"], ["--dry-run", "--set", "reward.0.args.allow_uncontained=true"]):
    try:
        app(["train", sys.argv[1], *options])
    except SystemExit as error:
        print(f"\\nexit {error.code}", flush=True)
"""


def test_a_run_where_neither_namespaces_nor_landlock_can_be_had_is_refused_unless_the_user_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "tests": ["assert f(1)"]}\n' * 4)
    (tmp_path / "run.toml").write_text(
        f'[model.tiny]\n[rollout]\nmax_tokens = 32\n[data]\npath = "{tmp_path}/data.jsonl"\nholdout = 0\n'
        '[[reward]]\nfunction = "python_tests"\n'
    )
    monkeypatch.chdir(tmp_path)
    output, _ = start_command([sys.executable, "-c", WITHOUT_WALLS, str(tmp_path / "run.toml")]).communicate(200)
    run, dry_run, agreed = re.split(r"exit (?=\d)", " ".join(output.split()))[:-1]
    assert [text[0] for text in (dry_run, agreed)] == ["1", "1"] and output.endswith("exit 0\n"), output
    for said in (run, dry_run):
        assert "NOT contained: " in said and "--set reward.0.args.allow_uncontained=true" in said
        assert "Traceback" not in said
    assert "NOT contained: " in agreed
