"""Calls to the Linux kernel that Python does not offer: namespaces, mounts, capabilities, Landlock, seccomp."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_RECURSIVE, AT_FDCWD = 0x8000, -100
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
LAST_CAPABILITY = 63
EPERM, ENOSYS = 1, 38
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20

SYSCALLS: dict[str, tuple[int | None, int | None]] = {  # name: (x86_64, aarch64); None: not on this machine
    "socket": (41, 198),
    "mmap": (9, 222),
    "clone": (56, 220),
    "clone3": (435, 435),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
DENIED = (
    "socket",  # pairs of sockets within the program are another call, and allowed
    *("unshare", "setns", "mount", "pivot_root", "mount_setattr"),  # no way to another view of the machine
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"),  # nor into another process
    *("memfd_create", "memfd_secret", "shmget"),  # memory that no limit of ours counts
    *("msgget", "semget", "mq_open"),  # what outlives its process
    *("io_uring_setup", "bpf", "perf_event_open", "userfaultfd", "add_key", "keyctl", "open_by_handle_at"),
)
# What a process may do to files and processes of the same user, and Landlock does not control.
DENIED_WITHOUT_NAMESPACES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "file_setattr"),
    *("utime", "utimes", "futimesat", "utimensat"),
    *(
        "setxattr",
        "lsetxattr",
        "fsetxattr",
        "setxattrat",
        "removexattr",
        "lremovexattr",
        "fremovexattr",
        "removexattrat",
    ),
    *("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "setpriority", "ioprio_set"),
)
# The column of the table above, and the kernel's name for it.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *arguments: object) -> int:
    if _libc is None or platform.machine() not in MACHINES:
        raise OSError(ENOSYS, f"{name}: not on {sys.platform} {platform.machine()}")
    number = SYSCALLS[name][MACHINES[platform.machine()][0]]
    assert number is not None, name
    whole = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *whole), name)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    _call("mount", texts[0] or 0, texts[1], texts[2] or 0, flags, options.encode())


def unmount(target: str) -> None:
    assert _libc is not None
    _checked(_libc.umount2(target.encode(), MNT_DETACH), "umount2")


def make_read_only(target: str, *, is_recursive: bool = True) -> None:
    wanted = struct.pack("=QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    _call("mount_setattr", AT_FDCWD, target.encode(), AT_RECURSIVE if is_recursive else 0, wanted, len(wanted))


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", new.encode(), old.encode())


def control(option: int, value: int = 0, more: object = 0) -> None:
    if _libc is None:
        raise OSError(ENOSYS, f"prctl: not on {sys.platform}")
    extra = [ctypes.c_ulong(0), ctypes.c_ulong(0)]
    third = ctypes.c_ulong(more) if isinstance(more, int) else more
    _checked(_libc.prctl(option, ctypes.c_ulong(value), third, *extra), "prctl")


def drop_capabilities() -> None:
    """All of them, and every way to new ones."""
    control(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(LAST_CAPABILITY + 1):
        try:
            control(PR_CAPBSET_DROP, capability)
        except OSError:  # without the right to drop there is nothing to drop; or past the last one
            break
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _call("capset", header, nothing)


def hide() -> None:
    """No program of the same user can look into this process, which may know the tests, or change it."""
    with contextlib.suppress(OSError):
        control(PR_SET_DUMPABLE, 0)


# ---- Landlock --------------------------------------------------------------------------------------------------------------

LANDLOCK_READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read a file, list a folder
# From this version on: all rights over files that it knows.
LANDLOCK_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
LANDLOCK_FILE_ONLY = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)


def landlock_version() -> int:
    """0 where the kernel has none."""
    try:
        return _call("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Read below these, write below those, connect nowhere, and signal no process outside, as far as the kernel supports it."""
    version = landlock_version()
    if version == 0:
        raise OSError(ENOSYS, "landlock: the kernel has none")
    rights = LANDLOCK_FILES[max(known for known in LANDLOCK_FILES if known <= version)]
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", rights, network, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _call("landlock_create_ruleset", attributes, size, 0)
    for paths, allowed in ((readable, LANDLOCK_READ), (writable, rights)):
        for path in paths:
            _landlock_allow(rules, path, allowed & rights)
    control(PR_SET_NO_NEW_PRIVS, 1)
    _call("landlock_restrict_self", rules, 0)
    os.close(rules)


def _landlock_allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= LANDLOCK_FILE_ONLY
    _call("landlock_add_rule", rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


# ---- seccomp ---------------------------------------------------------------------------------------------------------------

LOAD, EQUAL, SET_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp(denied: Iterable[str]) -> None:
    """From here on, none of these calls: they return as not permitted. Nor user namespaces, nor limits of other processes, nor
    shared memory without a file: it stays when its addresses are given back, and no limit of ours counts it then."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(ENOSYS, f"seccomp: no table of calls for {machine}")
    column, name = MACHINES[machine]
    number = {call: found for call, numbers in SYSCALLS.items() if (found := numbers[column]) is not None}
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, name),
        (RETURN, 0, 0, KILL),  # a call in the manner of another machine: the numbers below would mean something else
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        code += [(SET_BITS, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    for call in number.keys() & set(denied):
        code += [(EQUAL, 0, 1, number[call]), (RETURN, 0, 0, REFUSE | EPERM)]
    code += [(EQUAL, 0, 1, number["clone3"]), (RETURN, 0, 0, REFUSE | ENOSYS)]  # libc then takes clone
    code += [(EQUAL, 0, 4, number["clone"]), (LOAD, 0, 0, 16), (SET_BITS, 0, 1, NEWUSER)]
    code += [(RETURN, 0, 0, REFUSE | EPERM), (RETURN, 0, 0, ALLOW)]
    code += [
        (EQUAL, 0, 5, number["mmap"]),
        (LOAD, 0, 0, 40),
        (SET_BITS, 0, 2, MAP_SHARED),
        (SET_BITS, 0, 1, MAP_ANONYMOUS),
    ]
    code += [(RETURN, 0, 0, REFUSE | EPERM), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, 3, number["prlimit64"]), (LOAD, 0, 0, 16), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE | EPERM)]
    code += [(RETURN, 0, 0, ALLOW)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(code), ctypes.addressof(filters))
    control(PR_SET_NO_NEW_PRIVS, 1)
    control(PR_SET_SECCOMP, 2, ctypes.byref(program))
