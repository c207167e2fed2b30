"""`millstream parts`: the names of all parts that a config can have. `millstream check`: one of your own, held to its tests."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct

from millstream import imports
from millstream.cli.common import AsJson, console, errors_shown
from millstream.config import parse_value
from millstream.errors import ConfigError
from millstream.run.env_check import env_report_lines, run_env_check
from millstream.run.own_parts import BUILT_IN

MAX_WHY_LINES = 6
INSTEAD = {"reward": "a reward is tried by the config that names it: millstream train RUN.toml --dry-run"}
TEST_FILE = """from millstream.testing.conformance import suite_of

TestPart = suite_of({kind!r}, {name!r}, {args!r}, {promises!r})
"""
REWRITTEN = 'import pytest\n\npytest.register_assert_rewrite("millstream.testing")\n'


class TestedPromise(Struct, frozen=True, kw_only=True):
    """One test of a part."""

    promise: str
    outcome: str  # kept, broken or skipped
    why: str = ""


class KindOfPart(Struct, frozen=True, kw_only=True):
    kind: str
    built_in: tuple[str, ...]
    installed: tuple[imports.InstalledPart, ...]


def parts_command(as_json: AsJson = False) -> None:
    """List the parts that a config can name. Built-in ones, and those that installed packages bring. Exit code 1 if two have
    the same name."""
    with errors_shown():
        kinds = [
            KindOfPart(
                kind=kind,
                built_in=names,
                installed=tuple(part for same in imports.installed(kind).values() for part in same),
            )
            for kind, names in BUILT_IN.items()
        ]
        if as_json:
            console.out(msgspec.json.encode(kinds).decode(), highlight=False)
        for one in [] if as_json else kinds:
            console.out(f"{one.kind:12} {', '.join(one.built_in) or '(none is built in)'}", highlight=False)
            for part in one.installed:
                console.out(f"{'':12} {part.name}: {part.path}, of the package {part.package}", highlight=False)
        for one in kinds:
            for part in one.installed:
                imports.check_clash(one.kind, part.name, one.built_in)


def check_command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="engine, learner, store, filter, loss, ...")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="my_engine.py:Engine, or a name of `millstream parts`.")],
    args: Annotated[
        list[str] | None, typer.Option("--args", metavar="KEY=VALUE", help="An argument of the part: --args least=0.2")
    ] = None,
    promises: Annotated[
        list[str] | None,
        typer.Option("--promise", metavar="KEY=VALUE", help="What it supports: --promise has_top_k=false"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test a part of your own. Runs the conformance tests of its kind, and says what it does not keep. Exit code 1 if anything
    is broken."""
    with errors_shown():
        if kind == "environment":
            reports = run_env_check(name, args or [], None, process=False, num_tasks=8)
            for line in (line for report in reports for line in env_report_lines(report)):
                console.out(line, highlight=False)
            is_kept = all(report.is_fit for report in reports)
        else:
            found = check_part(kind, name, _pairs(args, "--args"), _pairs(promises, "--promise"))
            is_kept = all(one.outcome != "broken" for one in found)
            for line in [msgspec.json.encode(found).decode()] if as_json else _lines(kind, name, found):
                console.out(line, highlight=False)
    if not is_kept:
        raise typer.Exit(1)


def _pairs(settings: Sequence[str] | None, option: str) -> dict[str, Any]:
    found = dict[str, Any]()
    for one in settings or ():
        key, equals, value = one.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {one}: expected KEY=VALUE")
        found[key.strip()] = parse_value(value.strip(), f"{option} {one}")
    return found


def _lines(kind: str, name: str, found: Sequence[TestedPromise]) -> Iterator[str]:
    counts = [f"{sum(one.outcome == outcome for one in found)} {outcome}" for outcome in ("kept", "broken", "skipped")]
    yield f"{kind} {name}: {', '.join(counts)}"
    for outcome in ("skipped", "broken"):
        for one in found:
            if one.outcome == outcome:
                yield f"{outcome}: {one.promise}"
                yield from (f"    {line}" for line in one.why.splitlines())


# ---- with pytest -----------------------------------------------------------------------------------------------------


def check_part(kind: str, name: str, args: dict[str, Any], promises: dict[str, Any]) -> list[TestedPromise]:
    """Run the tests of this kind. Raises `ConfigError` where they cannot be run."""
    if kind not in BUILT_IN:
        raise ConfigError(f"no tests of {kind!r}: use {', '.join(BUILT_IN)}{imports.meant(kind, BUILT_IN)}")
    if kind in INSTEAD:
        raise ConfigError(INSTEAD[kind])
    if name in BUILT_IN[kind]:
        raise ConfigError(
            f"the {kind} {name!r} is built in, and tested with the package: name one of your own, file.py:name"
        )
    if find_spec("pytest") is None:
        raise ConfigError("the tests need pytest, which is not installed: pip install pytest")
    imports.load_part(kind, name, BUILT_IN[kind])  # its errors are shown better than those of a collection
    import pytest

    collector = _Collector()
    with tempfile.TemporaryDirectory(prefix="millstream-check-") as folder, _alone():
        path = Path(folder, "test_part.py")
        path.write_text(TEST_FILE.format(kind=kind, name=imports.absolute(name), args=args, promises=promises))
        Path(folder, "conftest.py").write_text(REWRITTEN)
        options = ["-q", "--no-header", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", os.devnull]
        with Path(folder, "output").open("w") as output, redirect_stdout(output):
            pytest.main([str(path), "--rootdir", folder, "--basetemp", f"{folder}/tmp", *options], plugins=[collector])
    if collector.refused:
        raise ConfigError(collector.refused)
    if not collector.found:
        raise ConfigError(f"no test of the {kind} {name!r} was run: look at the names after --promise")
    return collector.found


@contextmanager
def _alone() -> Iterator[None]:
    """Without plugins that happen to be installed."""
    key = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        os.environ.pop(key) if before is None else os.environ.update({key: before})


class _Collector:
    """A plugin of pytest that keeps the outcome of every test."""

    def __init__(self) -> None:
        self.found: list[TestedPromise] = []
        self.refused = ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
            self.refused = " ".join(line[1:].strip() for line in lines) or str(report.longrepr)

    def pytest_runtest_logreport(self, report: Any) -> None:
        promise = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.skipped:
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.found.append(TestedPromise(promise=promise, outcome="skipped", why=why))
        elif report.failed:
            self.found.append(TestedPromise(promise=promise, outcome="broken", why=_why(report.longrepr)))
        elif report.when == "call":
            self.found.append(TestedPromise(promise=promise, outcome="kept"))


def _why(failure: Any) -> str:
    crash = getattr(failure, "reprcrash", None)
    message = str(failure) if crash is None else str(crash.message)
    expected = re.match(r"Failed: DID NOT RAISE <class '[\w.]*?(\w+)'>", message)
    if expected is not None:
        message = f"expected {expected[1]}, and nothing was raised"
    elif re.match(r"(\w+\.)*TimeoutError", message):
        message = "it did not end in time: something waits forever"
    message = re.sub(r"^AssertionError: ", "", message)
    lines = [line for line in message.splitlines() if line.strip()]
    return "\n".join(lines[:MAX_WHY_LINES]) or "it failed without a message"
