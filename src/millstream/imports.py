"""From `file.py:name` or `package.module:name` to what it names: the user's own code, found before a run begins."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError, shown
from millstream.paths import kind_of


def is_own(name: str) -> bool:
    """Whether a name in a config points to the user's code rather than to something built in."""
    return ":" in name


def load_function(name: str) -> Any:
    """Raises `ConfigError`, which says what was expected and where."""
    module_name, _, function_name = name.rpartition(":")
    module = _module_from(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(
            function_name, [key for key, value in vars(module).items() if callable(value)], n=1
        )
        meant = f". Did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"{module_name} has no function {function_name!r}{meant}")
    return function


def defined_in(module_name: str) -> dict[str, Any]:
    """What a file or module defines itself, by name. Raises `ConfigError`."""
    module = _module_from(module_name)
    return {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}


def absolute(name: str) -> str:
    """The same name, good from every folder."""
    module, colon, function = name.rpartition(":")
    return f"{Path(module).resolve()}:{function}" if colon and module.endswith(".py") else name


def _module_from(name: str) -> Any:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"cannot import {shown(name)}: {error}") from error
        except (Exception, SystemExit) as error:  # user code, or a name that no module can have
            raise ConfigError(f"{shown(name)} cannot be imported: {type(error).__name__}: {error}") from error
    path = Path(name)
    if kind_of(path) != "file":
        raise ConfigError(f"no file {path} (looked for it from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"{path.stem} of {path.resolve()}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code: reported as a config error, with its cause
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
