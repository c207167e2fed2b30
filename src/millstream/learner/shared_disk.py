"""Whether those who write a checkpoint together write it into one folder, and not each into one of the same name.

Guarantee: a snapshot counts as written only where whoever asked for it sees every file that its writers see.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from millstream.errors import LearnerError

MUST_BE_SEEN = "the run folder must be on a disk that the driver and all nodes with learner ranks or a critic see"
LATE_S, LOOK_S = 5.0, 0.2


def look_for_folder(folder: Path) -> None:
    """At the writer, before it writes: whoever asks for it has made the folder. Raises `OSError` where it is not seen."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{socket.gethostname()} has no folder {folder}: {MUST_BE_SEEN}")


def files_in(folder: Path) -> dict[str, int]:
    """Their sizes by name, as this process sees them."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def look_for_files(folder: Path, written: Mapping[str, Mapping[str, int]]) -> None:
    """At whoever asked for them, when all have written: `written` is what each writer sees there, by who it is. What is on a
    disk of the network may be seen a little later. Raises `LearnerError` that names the first file that is not here, or not as
    large."""
    deadline = time.monotonic() + LATE_S
    while (objection := _objection(folder, written)) is not None:
        if time.monotonic() >= deadline:
            raise LearnerError(f"{objection}: {MUST_BE_SEEN}")
        time.sleep(LOOK_S)


def _objection(folder: Path, written: Mapping[str, Mapping[str, int]]) -> str | None:
    here = files_in(folder)
    for who, files in written.items():
        for name, size in files.items():
            if here.get(name) != size:
                found = f"has {here[name]} bytes" if name in here else "is not there"
                return f"{who} wrote {size} bytes of {folder / name}; here it {found}"
    return None
