"""Checks of this machine for `millstream doctor`: a line each, with what to type where something is missing.

Nothing of a run is needed. torch is asked in a process of its own, so that a broken installation is a finding, not a crash.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from msgspec import Struct

from millstream.decoding import decode_json
from millstream.env.sandbox.programs import PROMISES, what_is_contained
from millstream.errors import MillstreamError
from millstream.hub import why_not_on_hub
from millstream.run.device import available_memory

CheckLevel = Literal["ok", "warn", "fail"]
MIN_PYTHON = (3, 11)
MIN_MEMORY = 2e9  # bytes, as all the next ones
MIN_FREE = 5e9
MIN_LEFT = 0.1e9
MIN_SHARED = 1e9
MIN_FILES = 1024
MIN_PROCESSES = 512
TORCH_S = 120.0
PORTS = {"serve": 8000, "serve-store": 7077, "serve-training": 8100}  # their defaults
ASK_TORCH = """
import json, torch
gpus = [(torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "threads": torch.get_num_threads()}))
"""


class MachineCheck(Struct, frozen=True, kw_only=True):
    """One line. `to_type`: what helps, empty where nothing is needed."""

    name: str
    level: CheckLevel = "ok"
    found: str
    to_type: str = ""


class TorchFound(Struct, frozen=True):
    version: str
    cuda: str | None
    gpus: list[tuple[str, int, int]]  # name, free and all bytes
    threads: int


def examine_machine() -> list[MachineCheck]:
    """All checks, in the order in which they are shown. One that cannot be made is a warning."""
    checks: list[Callable[[], Iterator[MachineCheck]]] = [
        _python,
        _torch,
        _cores,
        _memory,
        _disk,
        _shared_memory,
        _limits,
        _ports,
        _sandbox,
        _warm_process,
        _hub,
        _extras,
    ]
    found = list[MachineCheck]()
    for check in checks:
        try:
            found += check()
        except (OSError, ValueError, MillstreamError) as error:
            found.append(MachineCheck(name=check.__name__.strip("_").replace("_", " "), level="warn", found=f"{error}"))
    return found


def _python() -> Iterator[MachineCheck]:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        yield MachineCheck(
            name="python", level="fail", found=version, to_type=f"install Python {wanted} or later, and a new venv"
        )
    else:
        yield MachineCheck(name="python", found=f"{version}, {sys.executable}")


def _torch() -> Iterator[MachineCheck]:
    has_driver = shutil.which("nvidia-smi") is not None
    try:
        asked = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_S)
        said = asked.stdout.strip().splitlines()
        torch = decode_json(said[-1], TorchFound) if asked.returncode == 0 and said else None
        why = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        torch, why = None, f"it takes longer than {TORCH_S:g} s to import"
    if torch is None:
        yield MachineCheck(name="torch", level="fail", found=why, to_type="pip install --force-reinstall torch")
        return
    build = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs alone"
    yield MachineCheck(name="torch", found=f"{torch.version}, {build}, {torch.threads} threads")
    if not torch.gpus and not has_driver:
        yield MachineCheck(name="gpu", found="none: runs are on the CPU")
    elif not torch.gpus:
        to_type = "pip install torch, from a CUDA index (pytorch.org)" if not torch.cuda else "nvidia-smi"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        to_type = "unset CUDA_VISIBLE_DEVICES" if hidden in ("", "-1") else to_type
        yield MachineCheck(name="gpu", level="fail", found="there is a driver, and torch sees no GPU", to_type=to_type)
    for number, (name, free, whole) in enumerate(torch.gpus):
        is_taken = free < whole / 2
        yield MachineCheck(
            name=f"gpu {number}",
            level="warn" if is_taken else "ok",
            found=f"{name}, {free / 1e9:.1f} of {whole / 1e9:.1f} GB free",
            to_type="nvidia-smi, to see what takes its memory" if is_taken else "",
        )


def _cores() -> Iterator[MachineCheck]:
    here = os.cpu_count() or 1
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{granted} of {here}" + (f", OMP_NUM_THREADS = {threads}" if threads else "")
    is_few = granted < 2
    yield MachineCheck(
        name="cores",
        level="warn" if is_few else "ok",
        found=found,
        to_type="give it two or more: an engine and a learner share one core" if is_few else "",
    )


def _memory() -> Iterator[MachineCheck]:
    free = available_memory()
    if free is not None:
        is_little = free < MIN_MEMORY
        found = f"{free / 1e9:.1f} GB available"
        to_type = "end other programs, or give the container more" if is_little else ""
        yield MachineCheck(name="memory", level="warn" if is_little else "ok", found=found, to_type=to_type)


def _disk() -> Iterator[MachineCheck]:
    for name, place, variable in (
        ("disk", Path.cwd(), "run_dir (--set run_dir=FOLDER)"),
        ("temporary folder", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        can_write = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        free = shutil.disk_usage(place).free if place.is_dir() else 0
        level: CheckLevel = "fail" if not can_write or free < MIN_LEFT else "warn" if free < MIN_FREE else "ok"
        found = f"{place}, {free / 1e9:.1f} GB free" + ("" if can_write else ", and it cannot be written to")
        to_type = "" if level == "ok" else f"free some, or set {variable} to a folder on another disk"
        yield MachineCheck(name=name, level=level, found=found, to_type=to_type)


def _shared_memory() -> Iterator[MachineCheck]:
    """Where the workers of a cluster, and torch's own, put weights and rows."""
    place = Path("/dev/shm")
    if not place.is_dir():
        yield MachineCheck(name="shared memory", level="warn", found="no /dev/shm", to_type="mount a tmpfs there")
        return
    free = shutil.disk_usage(place).free
    is_little = free < MIN_SHARED
    to_type = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm" if is_little else ""
    found = f"{free / 1e9:.1f} GB free in {place}"
    yield MachineCheck(name="shared memory", level="warn" if is_little else "ok", found=found, to_type=to_type)


def _limits() -> Iterator[MachineCheck]:
    for name, kind, least, flag in (
        ("open files", resource.RLIMIT_NOFILE, MIN_FILES, "-n 65536"),
        ("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "-u 65536"),
    ):
        soft, hard = resource.getrlimit(kind)
        is_low = soft != resource.RLIM_INFINITY and soft < least
        shown = ["no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard)]
        found = f"{shown[0]} (at most {shown[1]})"
        to_type = f"ulimit {flag}" if is_low else ""
        yield MachineCheck(name=name, level="warn" if is_low else "ok", found=found, to_type=to_type)


def _ports() -> Iterator[MachineCheck]:
    for command, port in PORTS.items():
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(("127.0.0.1", port))
            except OSError as error:
                found, to_type = f"taken ({error.strerror})", f"millstream {command} --port {port + 1}"
                yield MachineCheck(name=f"port {port}", level="warn", found=found, to_type=to_type)
                continue
        yield MachineCheck(name=f"port {port}", found=f"free, for millstream {command}")


def _sandbox() -> Iterator[MachineCheck]:
    contained = what_is_contained()
    is_whole = all(getattr(contained, name) for name in PROMISES)
    to_type = "" if is_whole else "allow user namespaces, for the reward python_tests and for sandboxes"
    yield MachineCheck(name="sandbox", level="ok" if is_whole else "warn", found=contained.words(), to_type=to_type)


def _warm_process() -> Iterator[MachineCheck]:
    """Workers on a CPU are forks of it; without it they start as interpreters of their own, which takes seconds."""
    if os.environ.get("MILLSTREAM_FORKSERVER") == "off":
        found, to_type = "off: every worker starts an interpreter", "unset MILLSTREAM_FORKSERVER"
        yield MachineCheck(name="warm process", level="warn", found=found, to_type=to_type)
        return
    with tempfile.TemporaryDirectory(prefix="millstream-doctor-") as folder, socket.socket(socket.AF_UNIX) as line:
        try:
            line.bind(f"{folder}/socket")
        except OSError as error:
            found = f"no socket can be made in {tempfile.gettempdir()} ({error.strerror or error})"
            yield MachineCheck(name="warm process", level="warn", found=found, to_type="set TMPDIR to a short path")
            return
    yield MachineCheck(name="warm process", found="can be used")


def _hub() -> Iterator[MachineCheck]:
    why = why_not_on_hub("millstream/doctor", "models")
    if why:
        to_type = "use folders for model.path and data.path, or connect this machine"
        yield MachineCheck(name="hugging face hub", level="warn", found=why, to_type=to_type)
    else:
        yield MachineCheck(name="hugging face hub", found="answers")


def _extras() -> Iterator[MachineCheck]:
    """Optional packages, by the extra of this package that installs them."""
    try:
        requirements = metadata.requires("millstream") or []
    except metadata.PackageNotFoundError:
        yield MachineCheck(
            name="packages", level="warn", found="millstream is not installed", to_type="pip install -e ."
        )
        return
    by_extra = dict[str, list[str]]()
    for one in requirements:
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", one)
        if found is not None and found[2] not in ("dev", "all") and found[1] != "millstream":
            by_extra.setdefault(found[2], []).append(found[1])
    for extra, names in by_extra.items():
        versions = {name: _version(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        shown = ", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items())
        to_type = f"pip install 'millstream[{extra}]', if you want it" if missing else ""
        yield MachineCheck(name=f"extra {extra}", level="warn" if missing else "ok", found=shown, to_type=to_type)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
