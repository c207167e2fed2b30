"""The pages of the site that are made from the code: the configuration, the command line, and the Python API.

Every page is a function that returns Markdown. Types, defaults, allowed values and texts come from the structs, from typer's
app and from docstrings; nothing is written down here a second time. No torch: functions and protocols are read as source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import tokenize
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import typer
from msgspec import NODEFAULT, Struct, structs

import millstream
from millstream.cli.main import app
from millstream.run.config import RunConfig

PACKAGE = Path(millstream.__file__).parent
PROTOCOLS = (
    ("millstream.engine.base", "Engine"),
    ("millstream.env.base", "Environment"),
    ("millstream.env.base", "Context"),
    ("millstream.env.base", "Text"),
    ("millstream.env.sandbox.base", "Sandbox"),
    ("millstream.learner.base", "Learner"),
    ("millstream.learner.base", "Scorer"),
    ("millstream.learner.base", "Follower"),
    ("millstream.learner.base", "Critic"),
    ("millstream.store.base", "Store"),
    ("millstream.weights.base", "WeightChannel"),
    ("millstream.weights.transfer.base", "TransportFetch"),
    ("millstream.pipeline.attempts", "AttemptHost"),
    ("millstream.rpc.process", "Launcher"),
    ("millstream.run.backend", "Backend"),
    ("millstream.clock", "Clock"),
    ("millstream.events.types", "EventSink"),
)
SUITES = (
    "millstream.testing.algorithm",
    "millstream.testing.engine",
    "millstream.testing.learner",
    "millstream.testing.sandbox",
)
MAX_LINE = 100

# ---- source ----------------------------------------------------------------------------------------------------------


@functools.cache
def parsed(module: str) -> tuple[str, ast.Module]:
    stem = PACKAGE.joinpath(*module.split(".")[1:])
    path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    text = path.read_text()
    return text, ast.parse(text)


def definition(module: str, name: str) -> tuple[str, Any]:
    """The module that defines a name which another module may only import, and its class, function or assignment."""
    tree = parsed(module)[1]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and any(alias.name == name for alias in imported.names):
            return definition(imported.module or "", name)
    raise LookupError(f"{module} neither defines nor imports {name}")


def docstring(node: Any) -> str:
    return ast.get_docstring(node) or ""


def text_below(body: Sequence[ast.stmt], at: int) -> str:
    """The string below a field."""
    after = body[at + 1] if at + 1 < len(body) else None
    is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return inspect.cleandoc(ast.literal_eval(after.value)) if is_text else ""  # type: ignore[union-attr]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """On one line, or with a line for each argument."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = [_spaced(one) for one in _arguments(node.args)]
    line = f"{word} {node.name}({', '.join(arguments)}){result}"
    lines = "".join(f"    {one},\n" for one in arguments)
    return line if len(line) <= MAX_LINE else f"{word} {node.name}(\n{lines}){result}"


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Split where no bracket is open."""
    depth = start = 0
    text = ast.unparse(args)
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if text:
        yield text[start:].strip()


def _spaced(argument: str) -> str:
    """`a: int=0` as `a: int = 0`."""
    name, colon, rest = argument.partition(": ")
    return f"{name}{colon}{re.sub('=', ' = ', rest, count=1)}"


def field_texts(kind: type[Struct]) -> dict[str, str]:
    """What the source says of each field: the string below it, or the comment behind or above it."""
    text, tree = parsed(kind.__module__)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines = text.splitlines()
    node = next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == kind.__name__)
    found = {}
    for at, field in enumerate(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if below := text_below(node.body, at):
            found[field.target.id] = below
            continue
        above: list[str] = []
        line = field.lineno - 1
        while line in comments and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comments[line])
            line -= 1
        behind = [
            comments[line] for line in range(field.lineno, (field.end_lineno or field.lineno) + 1) if line in comments
        ]
        found[field.target.id] = " ".join([*above, *behind])
    return found


# ---- Markdown --------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Text for a cell of a table. What is in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    outside = [re.sub(r"([*_<\[\]])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = outside
    return "".join(parts).replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(text: str, language: str = "python") -> str:
    return f"````{language}\n{text}\n````"


# ---- the configuration -----------------------------------------------------------------------------------------------


class Section(Struct, frozen=True):
    """One table of a config: where it is, and the struct that holds it."""

    path: str
    kind: type[Struct]
    is_list: bool
    same_as: str | None
    """The path of an earlier table with the same keys."""


def struct_of(kind: Any) -> type[Struct] | None:
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    inner = get_args(kind) if get_origin(kind) in (Union, types.UnionType, tuple) else ()
    return next((found for one in inner if (found := struct_of(one)) is not None), None)


def sections() -> list[Section]:
    """Every table that a config may have, in the order of the structs."""
    found: list[Section] = []

    def visit(kind: type[Struct], path: str, is_list: bool) -> None:
        earlier = next((one.path for one in found if one.kind is kind), None)
        found.append(Section(path, kind, is_list, earlier))
        for field in structs.fields(kind) if earlier is None else ():
            if (inner := struct_of(field.type)) is not None:
                visit(inner, f"{path}.{field.name}".lstrip("."), get_origin(field.type) is tuple)

    visit(RunConfig, "", False)
    return found


def shown_type(kind: Any) -> str:
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "anything"}
    if kind in names:
        return names[kind]
    arguments = [one for one in get_args(kind) if one not in (type(None), Ellipsis)]
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{one}"`' if isinstance(one, str) else f"`{one}`" for one in arguments)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(shown_type, arguments)))
    if get_origin(kind) in (tuple, list):
        inner = shown_type(arguments[0])
        return "tables" if inner == "table" else f"list of {inner}"
    return "table"


def shown_default(field: structs.FieldInfo) -> str:
    if field.default is NODEFAULT and field.default_factory is NODEFAULT:
        return "required"
    if field.default is None:
        return "unset"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value in ((), [], {}, ""):
        return "empty"
    if isinstance(value, Struct) or struct_of(field.type) is not None:
        return "its defaults"
    return f"`{msgspec.json.encode(value).decode()}`"


def header(section: Section) -> str:
    brackets = f"[[{section.path}]]" if section.is_list else f"[{section.path}]"
    return f"## `{brackets}` {{#{section.path}}}" if section.path else "## Keys outside of tables"


def key_row(section: Section, field: structs.FieldInfo, text: str) -> list[str]:
    """A key that is a table links to it; any other has an anchor of its own."""
    path = f"{section.path}.{field.name}".lstrip(".")
    is_table = struct_of(field.type) is not None
    name = f"[`{field.name}`](#{path})" if is_table else f'<span id="{path}">`{field.name}`</span>'
    return [name, f"{shown_type(field.type)}; {shown_default(field)}", cell(text[:1].upper() + text[1:])]


def section_page(section: Section) -> str:
    texts = field_texts(section.kind)
    lines = [header(section), ""]
    about = section.kind.__dict__.get("__doc__")
    if about and not about.startswith(section.kind.__name__):
        lines += [inspect.cleandoc(about), ""]
    if section.same_as is not None:
        return "\n".join([*lines, f"The keys are those of `{section.same_as}`.", ""])
    rows = [key_row(section, field, texts[field.name]) for field in structs.fields(section.kind)]
    return "\n".join([*lines, table(["key", "type; default", "meaning"], rows), ""])


def configuration_page() -> str:
    return "\n".join(
        [
            "# Configuration reference",
            "",
            "Every key of a run's TOML file. This page is made from the config structs of the installed code.",
            "",
            "A key of a table is set in the file, or on the command line: `--set pipeline.max_lag=2`; in a list of tables with "
            "its number: `--set reward.0.weight=2`. An *unset* key is absent; the last column says after *None* what happens "
            "then. "
            "`millstream train RUN.toml --show-config` prints all keys with the values of a run.",
            "",
            *map(section_page, sections()),
        ]
    )


# ---- the command line ------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""

    def visit(group: Any, name: str) -> Iterator[tuple[str, Any]]:
        for key, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from visit(command, f"{name} {key}")
            else:
                yield f"{name} {key}", command

    return visit(typer.main.get_command(app), "millstream")


def command_page(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    words = [(one.metavar or one.name.upper()) + ("..." if one.nargs != 1 else "") for one in arguments]
    usage = [word if one.required else f"[{word}]" for word, one in zip(words, arguments, strict=True)]
    rows = [[f"`{word}`", cell(one.help or "")] for word, one in zip(words, arguments, strict=True)]
    for one in options:
        takes = "" if one.is_flag else f" {one.metavar or one.name.upper()}"
        names = ", ".join(f"`{text}{takes}`" for text in (*one.opts, *one.secondary_opts))
        has_default = not one.is_flag and one.default is not None and not callable(one.default)
        default = f" Default: `{one.default}`." if has_default else ""
        rows.append([names, cell(one.help or "") + default])
    lines = [f"## `{name}`", "", inspect.cleandoc(command.help or ""), ""]
    lines += [code(" ".join([name, *(["[OPTIONS]"] if options else []), *usage]), "text"), ""]
    if rows:
        lines += [table(["argument or option", "meaning"], rows), ""]
    return "\n".join(lines)


def commands_page() -> str:
    pages = [command_page(name, command) for name, command in commands()]
    about = "Every command of `millstream`, with its options. This page is made from the code; `--help` shows the same."
    return "\n".join(["# Command line reference", "", about, "", *pages])


# ---- the Python API --------------------------------------------------------------------------------------------------


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [code(signature(node)), "", docstring(node), ""]


def class_lines(module: str, node: ast.ClassDef) -> list[str]:
    """Docstring, fields and public methods of a class, as its source has them."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"### {node.name}", "", code(f"class {node.name}({bases})  # {module}"), "", docstring(node), ""]
    for at, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign):
            lines += [code(ast.unparse(one)), "", text_below(node.body, at), ""]
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("_"):
            lines += function_lines(one)
    return lines


def public_lines() -> list[str]:
    """The names of `millstream` itself. Config structs are on the configuration's page."""
    lines = ["## millstream", "", docstring(parsed("millstream")[1]), ""]
    tables = {one.kind.__name__: one for one in sections()}
    configs = []
    for name in millstream.__all__:
        if name == "__version__":
            continue
        module, node = definition("millstream", name)
        if name in tables:
            path = tables[name].path
            configs.append(f"- `{name}`: " + (f"the table `{path}`" if path else "the whole config"))
        elif isinstance(node, ast.ClassDef):
            lines += class_lines(module, node)
        elif isinstance(node, ast.Assign):  # a function that another one makes: train_async = as_coroutine(train)
            _, maker = definition(module, ast.unparse(node.value).partition("(")[0])
            lines += [f"### {name}", "", code(ast.unparse(node)), "", docstring(maker), ""]
        else:
            lines += [f"### {name}", "", *function_lines(node)]
    about = "Their fields are the keys of the [configuration reference](configuration.md)."
    return [*lines, "### Config structs", "", about, "", *configs, ""]


def suite_lines(module: str) -> list[str]:
    """A conformance suite: how it is used, what must be provided, and the rules that it tests."""
    _, tree = parsed(module)
    lines = [f"### {module}", "", docstring(tree), ""]
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Suite"):
            continue
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        lines += [f"#### {node.name}", "", docstring(node), ""]
        for one in methods:
            if not one.name.startswith(("test_", "_")):
                lines += function_lines(one)
        rules = [one.name.removeprefix("test_").replace("_", " ") for one in methods if one.name.startswith("test_")]
        lines += ["It tests that:", "", *(f"- {rule}" for rule in rules), ""]
    return lines


def api_page() -> str:
    lines = ["# Python API", "", "This page is made from the docstrings of the installed code.", "", *public_lines()]
    lines += [
        "## Protocols",
        "",
        "A part of your own is a class with the methods of one of these. No base class is needed.",
        "",
    ]
    for module, name in PROTOCOLS:
        lines += class_lines(module, definition(module, name)[1])
    lines += ["## millstream.testing", "", docstring(parsed("millstream.testing")[1]), ""]
    for module in SUITES:
        lines += suite_lines(module)
    return "\n".join(lines)
