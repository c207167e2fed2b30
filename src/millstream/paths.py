"""What is at a path that the user typed. A path that the system refuses to look at is an error that names it."""

from __future__ import annotations

import stat
from pathlib import Path
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
