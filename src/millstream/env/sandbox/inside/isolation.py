"""The walls around one program, from the outside in. Which of them stand is asked for by the other side (`walls`):

    root    namespaces of its own, made with root's rights, and an identity that nothing else on the machine has
    user    namespaces of its own, made in a user namespace: no rights are needed, where the kernel allows it
    none    no namespaces: Landlock where the kernel has it

In all three: resource limits, no capabilities, and a seccomp filter where the machine is known. Root's files and the kernel's
settings belong to root also in a user namespace, and without any capability: all but the scratch folder is mounted read-only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from . import syscalls

SCRATCH = "/scratch"
OLD = "/.old"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/mime.types")
DEVICES = ("null", "zero", "full", "random", "urandom")
FIRST_IDENTITY, MAX_IDENTITIES = 1_900_000_000, 4_194_304
FIRST_SMALL_IDENTITY, MAX_SMALL_IDENTITIES = 50_000, 10_000
MAX_FILES = 4096


def readable() -> list[str]:
    """What a Python program needs: the system's libraries, and Python's own folders."""
    own = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    return [*SYSTEM, *FILES, *sorted(path for path in own | {sys.prefix} if not _is_below(path, SYSTEM))]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def divide(walls: str) -> None:
    """Namespaces: of processes (from the next fork on), network, mounts, messages between processes, host name."""
    flags = syscalls.NEWPID | syscalls.NEWNET | syscalls.NEWNS | syscalls.NEWIPC | syscalls.NEWUTS
    if walls == "root":
        syscalls.unshare(flags)
    elif walls == "user":
        user, group = os.geteuid(), os.getegid()
        syscalls.unshare(flags | syscalls.NEWUSER)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def furnish(scratch_bytes: int) -> None:
    """A root of our own, in memory and read-only: Python and the system's libraries, a few devices, the processes of this
    namespace, and a scratch folder of bounded size. Everything goes with the namespace."""
    paths = readable()  # links are followed in the old root
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4m,mode=755")
    os.mkdir("/tmp" + OLD)
    syscalls.pivot_root("/tmp", "/tmp" + OLD)
    os.chdir("/")
    for path in paths:
        _bring(path)
    os.makedirs("/dev")
    for name in DEVICES:
        _bring(
            f"/dev/{name}", source="/dev/full" if name == "zero" else None
        )  # zeros, which cannot be mapped as memory
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink(SCRATCH, "/dev/shm")
    os.mkdir("/proc")
    with contextlib.suppress(OSError):  # where it is refused (in some containers), there is none
        flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount("proc", "/proc", "proc", flags)
    os.mkdir(SCRATCH)
    if not os.path.lexists("/tmp"):  # Python itself may be installed below it
        os.symlink(SCRATCH, "/tmp")
    options = f"size={scratch_bytes},nr_inodes={max(MAX_FILES, scratch_bytes >> 13)},mode=777"
    syscalls.unmount(OLD)
    os.rmdir(OLD)
    syscalls.mount("tmpfs", SCRATCH, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    syscalls.make_read_only("/", is_recursive=False)
    os.chdir(SCRATCH)


def _bring(path: str, source: str | None = None) -> None:
    """The same path, or `source`, from the old root into the new one, read-only. (A device can be written to, but its mode
    cannot be changed.) What is not there is left out."""
    old = OLD + (source or path)
    if not os.path.lexists(old) or os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        with open(path, "w"):
            pass
    syscalls.mount(old, path, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.make_read_only(path)


def become_nobody(number: int) -> bool:
    """From root to an identity that no other process has while `number`, a process id, is taken: it can neither signal nor read
    anything of other users, and its processes are counted by themselves. False where root lacks its rights."""
    for first, most in ((FIRST_IDENTITY, MAX_IDENTITIES), (FIRST_SMALL_IDENTITY, MAX_SMALL_IDENTITIES)):
        identity = first + number % most
        try:
            os.setgroups([])
            os.setresgid(identity, identity, identity)
            os.setresuid(identity, identity, identity)
        except OSError:  # a container that has fewer identities, or root without the right to change
            continue
        return True
    return False


def confine(walls: str, limits: dict[str, Any], number: int, scratch: str) -> None:
    """What the program's own process does to itself, last of all. There is no way back."""
    _limit(limits, num_others=_num_tasks() if walls == "none" and os.geteuid() != 0 else 0)
    if walls == "root" or (walls == "none" and os.geteuid() == 0 and _can_all_read()):
        become_nobody(number)
    with contextlib.suppress(OSError):
        syscalls.drop_capabilities()
    if walls == "none":
        with contextlib.suppress(OSError):
            devices = [f"/dev/{name}" for name in DEVICES]
            syscalls.landlock([*readable(), *devices], [scratch, "/dev/null"])
    denied = syscalls.DENIED + (syscalls.DENIED_WITHOUT_NAMESPACES if walls == "none" else ())
    with contextlib.suppress(OSError):
        syscalls.seccomp(denied)


def _num_tasks() -> int:
    """Processes and threads on this machine. The kernel counts those of a user together: without an identity or a namespace of
    its own, a program is counted with us."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def _limit(limits: dict[str, Any], *, num_others: int) -> None:
    for name, value in _resources({**limits, "processes": limits["processes"] + num_others}):
        number = getattr(resource, name, None)
        if number is not None:
            _set_limit(number, value)


def limit_cpu(seconds: float) -> None:
    """Of each process from here on: a signal that tells, and a second later one that kills."""
    _set_limit(resource.RLIMIT_CPU, max(1, round(seconds)), then=1)


def _set_limit(number: int, value: int, *, then: int = 0) -> None:
    hard = resource.getrlimit(number)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(number, (most, most + then if most != hard else most))


def _resources(limits: dict[str, Any]) -> Iterator[tuple[str, int]]:
    yield "RLIMIT_AS", limits["memory_bytes"]
    yield "RLIMIT_FSIZE", limits["file_bytes"]
    yield "RLIMIT_NPROC", limits["processes"]
    yield "RLIMIT_NOFILE", limits["open_files"]
    yield from (
        ("RLIMIT_CORE", 1),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
    )  # a core of 1: not to a program either


def _can_all_read() -> bool:
    """Whether the user `nobody` can read the Python installation: not if it is in a private home folder."""
    path = os.path.realpath(sys.base_prefix)
    while path != "/":
        if not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True
