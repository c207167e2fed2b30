"""What is at a path that the user typed, and what to type. A path that the system refuses to look at is an error that names
it. And `sync_path`: from here on it survives a power failure."""

from __future__ import annotations

import difflib
import os
import shutil
import stat
import sys
from pathlib import Path
from shlex import quote
from typing import Literal

from millstream.errors import ConfigError, shown

PathKind = Literal["file", "folder", "other"]


def kind_of(path: str | Path, key: str | None = None) -> PathKind | None:
    """None: nothing is there. Raises `ConfigError` for a name that is too long, a folder without permission, or a null
    character. `key`: the key of the config that has the path."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot look at {f'{key} = ' if key else ''}{shown(str(path))}: {reason}") from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def did_you_mean(path: Path) -> str:
    """A sentence with the name in the same folder that is nearest to a path which is not there; empty if none is near."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def writable_parent(path: Path, key: str) -> Path:
    """The folder itself or the innermost one around it that is there. Raises `ConfigError` if it cannot be written to."""
    places = (path.absolute(), *path.absolute().parents)
    nearest = next(place for place in places if kind_of(place, key) is not None)
    if not nearest.is_dir():
        raise ConfigError(f"{key} = {str(path)!r}: {nearest} is no folder that can be written to: it is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} = {str(path)!r}: {nearest} is no folder that can be written to: no permission")
    return nearest


def program() -> str:
    """What to type for `millstream`: its path where the shell would not find it by name."""
    typed = Path(sys.argv[0])
    if typed.name == "__main__.py" and shutil.which("millstream") is None:
        return "python -m millstream"
    is_found = typed.name != "millstream" or shutil.which("millstream") is not None
    return "millstream" if is_found else quote(str(typed))


def sync_path(path: Path) -> None:
    """A file's bytes, or a folder's entries, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
