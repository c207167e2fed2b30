"""From a name in a config to what it names: `file.py:name`, `package.module:name`, a part that an installed package brings
(an entry point, by its plain name), or an object that was passed from Python. Found before a run begins.

Nothing is imported before a config has a name that is not built in. `import millstream` and `--help` ask no package what it
brings."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millstream.errors import ConfigError, shown
from millstream.paths import kind_of

PASSED = "callable:"  # prefix of the name of an object that was passed from Python, which a config cannot hold
ENTRY_POINTS = {
    "environment": "millstream.environments",
    "reward": "millstream.rewards",
    "engine": "millstream.engines",
    "learner": "millstream.learners",
    "store": "millstream.stores",
    "weights": "millstream.weights",
    "loss": "millstream.losses",
    "advantage": "millstream.advantages",
    "filter": "millstream.filters",
    "sampler": "millstream.samplers",
    "schedule": "millstream.schedules",
    "tool_format": "millstream.tool_formats",
    "sandbox": "millstream.sandboxes",
    "tracker": "millstream.trackers",
}
"""The group of entry points that each kind of part is found in."""
_passed: dict[str, Any] = {}


class InstalledPart(NamedTuple):
    """What an installed package brings."""

    name: str
    path: str  # module:name
    package: str


def is_own(name: str) -> bool:
    """Whether a name in a config is a path to the user's code, or an object that was passed."""
    return ":" in name


def load_function(name: str) -> Any:
    """Raises `ConfigError`, which says what was expected and where."""
    if name.startswith(PASSED):
        if name not in _passed:
            raise ConfigError(
                f"{name.removeprefix(PASSED)} was passed to train from Python, and a config cannot hold it. Pass it again: "
                "millstream.resume(RUN, ...), with the same keyword; or name it in config.toml as file.py:name"
            )
        return _passed[name]
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


def pass_object(kind: str, part: Any) -> str:
    """The name, for a config, of an object of Python. Objects are kept while this process lasts. `kind`: all functions without
    a name have one name."""
    module, qualified = getattr(part, "__module__", None), getattr(part, "__qualname__", type(part).__qualname__)
    name = f"{PASSED}{module}.{qualified} ({kind})"
    _passed[name] = part
    return name


def is_only_here(name: str) -> bool:
    """Whether no other process can import it: it was passed from Python, or is of the user's script."""
    return name.startswith((PASSED, "__main__:"))


# ---- parts of one's own ----------------------------------------------------------------------------------------------


def installed(kind: str) -> dict[str, list[InstalledPart]]:
    """What installed packages bring, by name; several parts: their packages clash. Imports none of them."""
    return _installed(tuple(sys.path)).get(ENTRY_POINTS[kind], {})


@functools.lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> dict[str, dict[str, list[InstalledPart]]]:
    """By group of entry points. All packages are read once, while the path is this one."""
    from importlib import metadata  # not for a config of built-in parts

    found = {group: dict[str, list[InstalledPart]]() for group in ENTRY_POINTS.values()}
    packages = set[str]()  # a package may be on the path twice: the first one is imported
    for distribution in metadata.distributions():
        if "millstream." not in (distribution.read_text("entry_points.txt") or "") or distribution.name in packages:
            continue
        packages.add(distribution.name)
        for point in distribution.entry_points:
            if point.group in found:
                part = InstalledPart(point.name, f"{point.module}:{point.attr}", distribution.name)
                found[point.group].setdefault(part.name, []).append(part)
    return found


def is_part(kind: str, name: str) -> bool:
    """Whether a name that is not built in is a path, or that of an installed part."""
    return is_own(name) or name in installed(kind)


def load_part(kind: str, name: str, built_in: Iterable[str] = ()) -> Any:
    """What a name that is not built in stands for. Raises `ConfigError`, which lists the names that there are."""
    if is_own(name):
        return load_function(name)
    check_clash(kind, name, built_in)
    if name not in installed(kind):
        raise ConfigError(unknown_part(kind, name, built_in))
    part = installed(kind)[name][0]
    try:
        return load_function(part.path)
    except ConfigError as error:
        raise ConfigError(f"the {kind} {name!r} of the package {part.package}: {error}") from error


def check_clash(kind: str, name: str, built_in: Iterable[str] = ()) -> None:
    """Raises `ConfigError` if two packages, or one and Millstream, have a part of this name."""
    found = [] if is_own(name) else installed(kind).get(name, [])
    owners = [f"the package {part.package} ({part.path})" for part in found]
    if name in set(built_in):
        owners.append("Millstream itself")
    if found and len(owners) > 1:
        raise ConfigError(
            f"two have a {kind} named {name!r}: {' and '.join(owners)}. Name the one that you mean by its path: "
            f"{found[0].path!r}; or pip uninstall {found[0].package}"
        )


def unknown_part(kind: str, name: str, built_in: Iterable[str] = ()) -> str:
    """What is wrong with a name that nothing has, with those that there are."""
    known = list(dict.fromkeys([*built_in, *installed(kind)]))
    use = f"use {', '.join(known)}, or" if known else "use"
    what = f"no {kind.replace('_', ' ')} {shown(name)!r}"
    return f"{what}: {use} one of your own: file.py:name or package.module:name{meant(name, known)}"


def meant(name: str, names: Iterable[str]) -> str:
    """A sentence with the nearest name; empty if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f". Did you mean {near[0]}?" if near else ""


def bound(part: Any, args: Mapping[str, Any], where: str, positional: Sequence[str] = ()) -> Callable[..., Any]:
    """A function with the keyword arguments that the config has for it; of a class, an object made with them. `positional`:
    what a call gives. Raises `ConfigError` where they do not fit; `where`: the key of the arguments."""
    is_class = inspect.isclass(part)
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # some callables of C have none
        return functools.partial(part, **args)
    try:
        signature.bind(*([] if is_class else positional), **args)
    except TypeError as error:
        name, taken = getattr(part, "__name__", type(part).__name__), ", ".join(positional)
        expected = "" if is_class else f" (it is called with {taken})"
        raise ConfigError(f"{where} = {dict(args)} does not fit {name}{signature}: {error}{expected}") from error
    if not is_class:
        return functools.partial(part, **args)
    try:
        made = part(**args)
    except Exception as error:  # user code: reported as a config error, with its cause
        raise ConfigError(f"{part.__name__} with {where} = {dict(args)}: {type(error).__name__}: {error}") from error
    if not callable(made):
        raise ConfigError(f"{part.__name__} is a class without __call__(self, {', '.join(positional)})")
    found: Callable[..., Any] = made
    return found


def check_methods(part: Any, methods: Sequence[str], what: str, protocol: str) -> None:
    """Raises `ConfigError` unless an object, or a class, has these methods."""
    if missing := [name for name in methods if not callable(getattr(part, name, None))]:
        raise ConfigError(f"{what} has no method {', '.join(missing)}: see {protocol}, and docs/parts.md")


# ---- files and modules -----------------------------------------------------------------------------------------------


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
