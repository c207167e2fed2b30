"""The structure of the package in numbers, measured with `ast`; beside an older state of it, if one is given.

    .venv/bin/python bench/house.py [SRC] [--before REVISION_OR_FOLDER] [--json] [--list]

The calls to a decode step and to an optimizer step are counted along the chains in `house_paths.py`, and every hop is checked
against the code. The exit code is 1 if a chain does not fit the code any more, or if there is none for the layout of SRC.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from house_paths import LAYOUTS, Hop, Layout

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/millstream"
SOURCE = ROOT / PACKAGE
FUNCTION_LINES = 60
CLASS_METHODS = 25
CLASS_METHODS_OUTSIDE_TESTING = 30
RAW_READS = frozenset(
    ("recv", "recv_into", "recvfrom", "recvmsg", "recv_fds", "sock_recv", "sock_recv_into", "readexactly", "readuntil")
)
"""Methods that read bytes from a socket or a stream."""
RAW_CALLBACKS = frozenset(("data_received", "buffer_updated"))
"""Methods of a protocol that asyncio calls with bytes."""
LENGTH_DECODERS = frozenset(("from_bytes", "unpack", "unpack_from"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module(NamedTuple):
    path: str
    """Relative to the root of the tree."""
    num_lines: int
    body: ast.Module


class Tree(NamedTuple):
    """A source tree, and the tests that belong to it."""

    modules: tuple[Module, ...]
    tests: tuple[Module, ...]


class Offender(NamedTuple):
    """Something that counts, where it is, and how large it is."""

    place: str
    name: str
    size: int = 1

    def __str__(self) -> str:
        return f"{self.place} {self.name}" + (f" ({self.size})" if self.size != 1 else "")


class Value(NamedTuple):
    workload: str
    metric: str
    number: float | None
    """None: it cannot be counted in this tree."""
    what: str = ""
    """Which one it is, of a maximum."""


class ChainBroken(Exception):
    """A chain of calls does not fit the code."""


# ---- reading a tree --------------------------------------------------------------------------------------------------


def read_tree(source: Path, tests: Path | None = None) -> Tree:
    """`tests`: by default the folder `tests` beside `src`; a tree without one has no tests."""
    tests = source.parent.parent / "tests" if tests is None else tests
    return Tree(tuple(_read_modules(source)), tuple(_read_modules(tests)))


def _read_modules(root: Path) -> Iterator[Module]:
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        yield Module(path.relative_to(root).as_posix(), text.count("\n"), parsed(text))


def parsed(text: str) -> ast.Module:
    """Without garbage collection: if a finalizer parses something in the middle of this (a traceback does), Python before
    3.11.8 loses count of its depth and raises SystemError (python/cpython#106905)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def opened(before: str, inside: Path) -> Iterator[Path]:
    """The package in a folder, or in a git revision, which is extracted into a temporary folder. `inside`: some folder of the
    repository."""
    if Path(before).is_dir():
        yield Path(before)
        return
    top = _git(inside, "rev-parse", "--show-toplevel").decode().strip()
    packed = _git(Path(top), "archive", before, PACKAGE, "tests")
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder) / PACKAGE


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], stdout=subprocess.PIPE, check=True).stdout


# ---- size ------------------------------------------------------------------------------------------------------------


def num_lines(modules: tuple[Module, ...]) -> int:
    """Newlines of all files, as `wc -l` counts them: code, comments and blank lines."""
    return sum(module.num_lines for module in modules)


def largest_file(tree: Tree) -> Offender:
    """The module with the most lines."""
    largest = max(tree.modules, key=lambda module: module.num_lines)
    return Offender(largest.path, "", largest.num_lines)


def files_over(tree: Tree, limit: int) -> list[Offender]:
    """Modules with more than `limit` lines, the largest first."""
    found = [Offender(module.path, "", module.num_lines) for module in tree.modules if module.num_lines > limit]
    return _largest_first(found)


def functions(tree: Tree) -> list[Offender]:
    """Every `def` and `async def` (methods and nested functions too) with its lines from the line of `def` to its last."""
    return [
        Offender(f"{module.path}:{node.lineno}", node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for module in tree.modules
        for node in ast.walk(module.body)
        if isinstance(node, DEFINITIONS)
    ]


def functions_over(tree: Tree, limit: int) -> list[Offender]:
    """Functions with more than `limit` lines, the longest first."""
    return _largest_first([function for function in functions(tree) if function.size > limit])


def classes(tree: Tree, *, outside_testing: bool = False) -> list[Offender]:
    """Every class with the number of `def` and `async def` directly in its body; a property with a setter counts twice, and
    inherited methods do not count. `outside_testing`: without the folder `testing/`, whose suites have a method a test."""
    return [
        Offender(f"{module.path}:{node.lineno}", node.name, sum(isinstance(one, DEFINITIONS) for one in node.body))
        for module in tree.modules
        for node in ast.walk(module.body)
        if isinstance(node, ast.ClassDef) and not (outside_testing and module.path.startswith("testing/"))
    ]


def classes_over(tree: Tree, limit: int, *, outside_testing: bool = False) -> list[Offender]:
    """Classes with more than `limit` methods, the largest first."""
    found = classes(tree, outside_testing=outside_testing)
    return _largest_first([one for one in found if one.size > limit])


def _largest_first(found: list[Offender]) -> list[Offender]:
    return sorted(found, key=lambda one: (-one.size, one.place))


# ---- names -----------------------------------------------------------------------------------------------------------


def duplicate_names(tree: Tree, *, with_aliases: bool = True) -> dict[str, list[str]]:
    """Public names that are defined at the top level of two or more modules: name -> modules, the most frequent first.

    A definition is a `class`, `def` or `async def` directly in the body of a module whose name has no leading underscore.
    `with_aliases`: or a type alias, which is an assignment to a name in CapWords (`Answer = Now | Refused`) other than a type
    variable. Constants, `logger`, `__all__`, imports and what is inside `if` or `try` are not definitions.

    At 004ff2d that is 92 names, and 122 with aliases. A review of that revision counted 95 names in two to eight modules, with
    `Answer` in 8 and `Plan` in 5, by a rule that it does not state. `Answer` is in 8 modules only if aliases count.
    """
    found: dict[str, list[str]] = {}
    for module in tree.modules:
        for name in sorted(_public_names(module.body, with_aliases=with_aliases)):
            found.setdefault(name, []).append(module.path)
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))


def _public_names(module: ast.Module, *, with_aliases: bool) -> set[str]:
    names = set()
    for node in module.body:
        if isinstance(node, (ast.ClassDef, *DEFINITIONS)):
            names.add(node.name)
        elif with_aliases:
            names |= _aliases(node)
    return {name for name in names if not name.startswith("_")}


def _aliases(node: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign) and not _is_type_variable(node.value):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
        targets = [node.target]
    elif type(node).__name__ == "TypeAlias":  # Python 3.12: type Name = ...
        targets = [node.name]  # type: ignore[attr-defined]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if name[0].isupper() and not name.isupper()}


def _is_type_variable(value: ast.expr) -> bool:
    kinds = ("TypeVar", "ParamSpec", "TypeVarTuple")
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in kinds


# ---- sockets ---------------------------------------------------------------------------------------------------------


def raw_readers(tree: Tree) -> list[str]:
    """Modules that read bytes from a socket or a stream themselves: they call one of `RAW_READS`, or define one of
    `RAW_CALLBACKS`. At 004ff2d there are twelve."""
    return [module.path for module in tree.modules if _reads_raw(module.body)]


def hand_made_framings(tree: Tree) -> list[str]:
    """Modules that cut messages out of a stream themselves: raw readers that also decode a length (`int.from_bytes`,
    `struct.unpack`).

    At 004ff2d there are nine, as a review counted: control, isolated, isolated_worker, pool, worker, exam, zygote, frames and
    wire. The other three raw readers read a size that they know (holder, sender) or to the end (sandbox). As pairs of ends
    that talk to each other the twelve are nine protocols, too: frames, wire, holder, control, isolated with isolated_worker,
    pool with worker, exam, sandbox with zygote, sender.
    """
    return [
        module.path
        for module in tree.modules
        if _reads_raw(module.body) and _called_attributes(module.body) & LENGTH_DECODERS
    ]


def _reads_raw(module: ast.Module) -> bool:
    defined = {node.name for node in ast.walk(module) if isinstance(node, DEFINITIONS)}
    return bool(_called_attributes(module) & RAW_READS or defined & RAW_CALLBACKS)


def _called_attributes(module: ast.Module) -> set[str]:
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    return {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}


# ---- statements ------------------------------------------------------------------------------------------------------


def broad_excepts(tree: Tree) -> list[Offender]:
    """Handlers of `Exception`, of `BaseException`, of a tuple with one of them, or of everything (`except:`)."""
    return [
        Offender(f"{module.path}:{node.lineno}", "except" if node.type is None else ast.unparse(node.type))
        for module in tree.modules
        for node in ast.walk(module.body)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type)
    ]


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(one, ast.Name) and one.id in ("Exception", "BaseException") for one in kinds)


def parallel_assignments(tree: Tree, *, of_attributes: bool = False) -> list[Offender]:
    """Assignments of a tuple to a tuple of the same length (`a, b = x, y`); what unpacks one value is none. `of_attributes`:
    only those that have an attribute among their targets (`self.a, b = x, y`)."""
    found = []
    for module in tree.modules:
        for node in ast.walk(module.body):
            if isinstance(node, ast.Assign) and _is_parallel(node, of_attributes=of_attributes):
                found.append(Offender(f"{module.path}:{node.lineno}", ast.unparse(node.targets[0])))
    return found


def _is_parallel(node: ast.Assign, *, of_attributes: bool) -> bool:
    tuples = [target for target in node.targets if isinstance(target, ast.Tuple)]
    return isinstance(node.value, ast.Tuple) and any(
        len(target.elts) == len(node.value.elts)
        and (not of_attributes or any(isinstance(one, ast.Attribute) for one in target.elts))
        for target in tuples
    )


# ---- tests -----------------------------------------------------------------------------------------------------------


def tests_that_import_tests(tree: Tree) -> list[str]:
    """Files below `tests/`, of any name, that import from a file called `test_*.py` there."""
    stems = {Path(module.path).stem for module in tree.tests}
    tests = {stem for stem in stems if stem.startswith("test_")}
    return [module.path for module in tree.tests if _imported_parts(module.body) & tests]


def _imported_parts(module: ast.Module) -> set[str]:
    """Every part of the dotted names that a module imports, or imports from."""
    dotted: list[str] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            dotted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted += [node.module or "", *(alias.name for alias in node.names)]
    return {part for name in dotted for part in name.split(".")}


# ---- chains of calls -------------------------------------------------------------------------------------------------


def layout_of(source: Path) -> Layout | None:
    """The layout whose marker is in the tree."""
    return next((layout for layout in LAYOUTS if (source / layout.marker).exists()), None)


def verify(tree: Tree, chain: tuple[Hop, ...]) -> tuple[int, int]:
    """The number of calls on a chain, and of the files that it visits. Raises `ChainBroken` if a function is not there, or if
    its caller does not mention it: neither its name nor that of its class (for `__init__`), nor the `via` of the hop."""
    modules = {module.path: module.body for module in tree.modules}
    found = [_function(modules, hop.function) for hop in chain]
    for caller, callee, node in zip(chain, chain[1:], found, strict=False):
        name = callee.via or callee.function.replace(":", ".").removesuffix(".__init__").rpartition(".")[2]
        if name not in _mentioned(node, with_strings=bool(callee.via)):
            raise ChainBroken(f"{caller.function} does not mention {name}: it should lead to {callee.function}")
    return len(chain) - 1, len({hop.function.partition(":")[0] for hop in chain})


def _function(modules: dict[str, ast.Module], function: str) -> Definition:
    module, _, qualname = function.partition(":")
    path = module.replace(".", "/")
    node: ast.AST | None = modules.get(f"{path}.py") or modules.get(f"{path}/__init__.py")
    for name in qualname.split("."):
        scopes = () if node is None else ast.walk(node)
        kinds = (ast.ClassDef, *DEFINITIONS)
        node = next((one for one in scopes if isinstance(one, kinds) and one is not node and one.name == name), None)
    if not isinstance(node, DEFINITIONS):
        raise ChainBroken(f"there is no function {function}")
    return node


def _mentioned(node: ast.AST, *, with_strings: bool) -> set[str]:
    """Names and attributes that a function mentions; with the words of its strings, if asked for."""
    names = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            names.add(one.id)
        elif isinstance(one, ast.Attribute):
            names.add(one.attr)
        elif with_strings and isinstance(one, ast.Constant) and isinstance(one.value, str):
            names |= set(re.findall(r"\w+", one.value))
    return names


def call_depths(tree: Tree, layout: Layout | None) -> tuple[list[Value], list[str]]:
    """Calls and files on each chain of a layout, and what is wrong with it."""
    names = [name for one in LAYOUTS for name in one.chains]
    values: list[Value] = []
    troubles: list[str] = []
    for name in dict.fromkeys(names):
        calls, files = None, None
        chain = None if layout is None else layout.chains.get(name)
        try:
            if chain is None:
                raise ChainBroken(
                    f"no chain in house_paths.py for the layout {layout.name if layout else 'of this tree'}"
                )
            calls, files = verify(tree, chain)
        except ChainBroken as error:
            troubles.append(f"{name}: {error}")
        values.append(Value("calls", f"from train to a{'n' if name[0] in 'aeiou' else ''} {name}", calls))
        values.append(Value("calls", f"files on the way to a{'n' if name[0] in 'aeiou' else ''} {name}", files))
    return values, troubles


# ---- the table -------------------------------------------------------------------------------------------------------


def measure(source: Path) -> tuple[list[Value], list[str]]:
    """All values of a tree, and what is wrong with its chains."""
    tree = read_tree(source)
    depths, troubles = call_depths(tree, layout_of(source))
    return [*_sizes(tree), *_habits(tree), *depths, *_of_tests(tree)], troubles


def _sizes(tree: Tree) -> list[Value]:
    lengths = sorted(function.size for function in functions(tree))
    longest = max(functions(tree), key=lambda one: one.size)
    widest = max(classes(tree), key=lambda one: one.size)
    widest_outside = max(classes(tree, outside_testing=True), key=lambda one: one.size)
    largest = largest_file(tree)
    over_outside = classes_over(tree, CLASS_METHODS_OUTSIDE_TESTING, outside_testing=True)
    return [
        Value("size", "files", len(tree.modules)),
        Value("size", "lines", num_lines(tree.modules)),
        Value("size", "lines of the largest file", largest.size, largest.place),
        Value("functions", f"over {FUNCTION_LINES} lines", len(functions_over(tree, FUNCTION_LINES))),
        Value("functions", "median lines", statistics.median(lengths)),
        Value("functions", "p90 lines", lengths[int(len(lengths) * 0.9)]),
        Value("functions", "max lines", longest.size, f"{longest.place} {longest.name}"),
        Value("classes", f"over {CLASS_METHODS} methods", len(classes_over(tree, CLASS_METHODS))),
        Value("classes", f"over {CLASS_METHODS_OUTSIDE_TESTING} methods outside testing/", len(over_outside)),
        Value("classes", "most methods", widest.size, widest.name),
        Value("classes", "most methods outside testing/", widest_outside.size, widest_outside.name),
    ]


def _habits(tree: Tree) -> list[Value]:
    plain, with_aliases = duplicate_names(tree, with_aliases=False), duplicate_names(tree)
    name, places = next(iter(with_aliases.items()), ("", []))
    attributes = parallel_assignments(tree, of_attributes=True)
    return [
        Value("names", "public classes and functions in two or more modules", len(plain)),
        Value("names", "the same, with type aliases", len(with_aliases)),
        Value("names", "most modules that define one name", len(places), name),
        Value("sockets", "modules with hand-made framing", len(hand_made_framings(tree))),
        Value("sockets", "modules that read a raw socket", len(raw_readers(tree))),
        Value("statements", "broad excepts", len(broad_excepts(tree))),
        Value("statements", "parallel assignments", len(parallel_assignments(tree))),
        Value("statements", "parallel assignments of attributes", len(attributes)),
    ]


def _of_tests(tree: Tree) -> list[Value]:
    return [
        Value("tests", "lines", num_lines(tree.tests)),
        Value("tests", "files that import from a test file", len(tests_that_import_tests(tree))),
    ]


def ratio(now: float | None, before: float | None) -> float | None:
    """before / now: above 1 is better. Where nothing is left, as if one were: a lower bound."""
    if now is None or before is None:
        return None
    return 1.0 if now == before else round(before / max(now, 1), 2)


def json_rows(now: list[Value], before: list[Value] | None) -> list[dict[str, Any]]:
    older = {(value.workload, value.metric): value.number for value in before or ()}
    rows = []
    for value in now:
        theirs = older.get((value.workload, value.metric))
        row = {"workload": value.workload, "metric": value.metric, "ours": value.number}
        rows.append({**row, "peer": "before", "theirs": theirs, "ratio": ratio(value.number, theirs)})
    return rows


def table(now: list[Value], before: list[Value] | None) -> str:
    older = {(value.workload, value.metric): value for value in before or ()}
    head = ["", "", "before", "now", "ratio", ""] if before else ["", "", "now", ""]
    lines = [head]
    for value in now:
        line = [value.workload, value.metric]
        if before:
            old = older.get((value.workload, value.metric), value._replace(number=None))
            line += [_shown(old.number), _shown(value.number), _shown(ratio(value.number, old.number)), value.what]
        else:
            line += [_shown(value.number), value.what]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    numbers = range(2, len(head) - 1)
    aligned = (
        [cell.rjust(width) if column in numbers else cell.ljust(width) for column, (cell, width) in enumerate(cells)]
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:,.12g}"


def offenders(tree: Tree) -> str:
    """What is counted, one by one."""
    several = [f"{name} ({len(paths)}): {', '.join(paths)}" for name, paths in duplicate_names(tree).items()]
    outside = classes_over(tree, CLASS_METHODS_OUTSIDE_TESTING, outside_testing=True)
    lists = {
        f"functions over {FUNCTION_LINES} lines": list(map(str, functions_over(tree, FUNCTION_LINES))),
        f"classes over {CLASS_METHODS_OUTSIDE_TESTING} methods outside testing/": list(map(str, outside)),
        "modules with hand-made framing": hand_made_framings(tree),
        "modules that read a raw socket": raw_readers(tree),
        "names in two or more modules": several,
        "parallel assignments of attributes": list(map(str, parallel_assignments(tree, of_attributes=True))),
        "broad excepts": list(map(str, broad_excepts(tree))),
        "files that import from a test file": tests_that_import_tests(tree),
    }
    return "\n".join(f"\n{title}:" + "".join(f"\n  {line}" for line in lines) for title, lines in lists.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE, metavar="SRC")
    parser.add_argument("--before", metavar="REVISION_OR_FOLDER", help="an older state to compare with")
    parser.add_argument("--json", action="store_true", help="print rows of JSON and nothing else")
    parser.add_argument("--list", action="store_true", help="print what is counted, too")
    options = parser.parse_args()
    now, troubles = measure(options.source)
    before: list[Value] | None = None
    if options.before is not None:
        with opened(options.before, options.source) as folder:
            before, more = measure(folder)
        troubles = [*(f"now, {one}" for one in troubles), *(f"before, {one}" for one in more)]
    print(json.dumps(json_rows(now, before)) if options.json else table(now, before))
    if options.list and not options.json:
        print(offenders(read_tree(options.source)))
    for trouble in troubles:
        print(trouble, file=sys.stderr)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
