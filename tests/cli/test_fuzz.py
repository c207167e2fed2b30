"""Whatever is in a config, a data set, a log or an argument: a command ends with exit code 0, 1 or 2 and one message, never
with a traceback. A few cases in the default suite, 2,000 of each kind in the slow one."""

from __future__ import annotations

import datetime
import inspect
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import tomlkit
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from typer.testing import CliRunner

import millstream.errors
from millstream.cli.main import app
from millstream.config import _paths
from millstream.env.data import DataConfig, read
from millstream.env.games.frozen_lake import FrozenLake
from millstream.env.games.toy import ALPHABET
from millstream.env.rewards import BUILT_IN_REWARDS
from millstream.errors import DataError, MillstreamError
from millstream.model.tiny import character_tokenizer
from millstream.run.config import RunConfig
from millstream.run.text import TokenizerText

GOLDEN = Path(__file__).parents[1] / "golden/max_lag_2.jsonl"
NUMBERS = [
    pytest.param(40, id="few"),
    pytest.param(2_000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
]
KNOWN = {
    name
    for name, kind in vars(millstream.errors).items()
    if isinstance(kind, type) and issubclass(kind, MillstreamError)
}


def fuzz(number: int, cases: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    given(cases)(
        settings(
            max_examples=number,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )(check)
    )()


def say(*arguments: str) -> None:
    """Run a command, in this process: it ends by itself, with one message."""
    result = CliRunner().invoke(app, list(arguments))
    said = f"{str(arguments)[:1000]}: {result.exit_code}: {result.output[:3000]}"
    assert result.exception is None or isinstance(result.exception, SystemExit), said
    assert result.exit_code in (0, 1, 2), said
    assert "Traceback" not in result.output and "That is not expected" not in result.output, said
    if result.exit_code == 1 and result.stderr:
        name, _, message = result.stderr.partition(": ")
        assert name in KNOWN and message.strip(), said
        assert all(line.startswith(("And: ", "  ")) for line in result.stderr.splitlines()[1:]), said


# ---- values --------------------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["", "\0", "x" * 300, "x/" * 3000, "..", "/", "/dev/null", "~", "a\nb", "\x1b[31m", "\u202e", "%s{}", "[bold]"]
    ),
    st.sampled_from(
        ["no.py:f", "os:nothing", "os:getcwd", ":", "a:", ":b", ".:x", "x" * 300 + ".py:f", "math:sqrt", "exact_match"]
    ),
)
INTEGERS = st.sampled_from([0, 1, -1, 2, 3, 7, 64, 2**31, 2**63 - 1, -(2**63), 2**63, 10**30, 16**1000])
FLOATS = st.sampled_from(
    [0.0, -0.0, 0.5, 1.05, -1.0, 1e-300, 5e-324, 1e300, 1.7e308, float("nan"), float("inf"), -float("inf")]
)
LEAVES = st.one_of(
    TEXTS, INTEGERS, FLOATS, st.booleans(), st.just(datetime.date(2026, 1, 2)), st.just(datetime.time(3, 4))
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, at their edges."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return tables_of(kind)
    if get_origin(kind) is tuple:
        return st.lists(values_of(get_args(kind)[0]), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(TEXTS, ANYTHING, max_size=3)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_args(kind):
        return st.one_of(*(values_of(one) for one in get_args(kind) if one is not type(None)))
    return {bool: st.booleans(), int: INTEGERS, float: st.one_of(FLOATS, INTEGERS), str: TEXTS}.get(kind, ANYTHING)


def tables_of(struct: type[Struct]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {
        field.name: st.one_of(values_of(field.type), values_of(field.type), ANYTHING)
        for field in msgspec.structs.fields(struct)
    }
    some = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    known = some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    unknown = st.one_of(st.just({}), st.just({}), st.dictionaries(TEXTS, ANYTHING, max_size=1))
    return st.builds(lambda one, other: {**other, **one}, known, unknown)


BASE = {
    "model": {"tiny": {"hidden": 8, "heads": 2, "layers": 1}},
    "data": {"toy": "sort_digits", "size": 64, "holdout": 8},
}


def arguments_of(function: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Values for its own arguments, and for one that it does not have."""
    names = [*(inspect.signature(function).parameters if callable(function) else []), "strange"]
    return st.dictionaries(st.sampled_from(names), ANYTHING, max_size=3)


REWARDS = st.sampled_from(sorted(set(BUILT_IN_REWARDS) - {"python_tests"})).flatmap(  # that one tries the sandbox
    lambda name: st.fixed_dictionaries(
        {"function": st.just(name), "args": arguments_of(BUILT_IN_REWARDS[name].function)},
        optional={"group": st.booleans(), "process": st.booleans(), "weight": FLOATS},
    )
)
ENVIRONMENTS = st.fixed_dictionaries(
    {"use": st.sampled_from(["frozen_lake", "single_turn"]), "args": arguments_of(FrozenLake)},
    optional={"share": FLOATS, "name": TEXTS, "max_concurrent": INTEGERS, "process": st.booleans()},
)
NAMED = st.fixed_dictionaries(
    {},
    optional={
        "reward": st.lists(REWARDS, max_size=2),
        "environment": st.lists(ENVIRONMENTS, max_size=2),
        "data": st.just({"size": 8, "holdout": 2}),
        "model": st.just({"tiny": {}}),
    },
)


def with_base(data: dict[str, Any]) -> dict[str, Any]:
    """Most of them have a model and data, so that what comes after these is reached."""
    return {
        key: {**BASE[key], **data[key]}
        if isinstance(data.get(key), dict) and key in BASE
        else data.get(key, BASE.get(key))
        for key in (*BASE, *data)
    }


CONFIGS = st.one_of(
    tables_of(RunConfig).map(with_base),
    tables_of(RunConfig),
    st.builds(lambda one, other: {**BASE, **one, **other}, tables_of(RunConfig), NAMED),
    NAMED,
)
OVERRIDES = st.builds(
    lambda key, value: f"{key}={value}",
    st.one_of(st.sampled_from(sorted(_paths(RunConfig))), TEXTS, st.just("environment.0.args.x.0.y")),
    st.one_of(
        TEXTS,
        LEAVES.map(lambda leaf: hex(leaf) if isinstance(leaf, int) else str(leaf)),
        st.just("\udcff"),
        st.just(""),
    ),
).filter(lambda override: "\0" not in override)  # the system passes none


# ---- configs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_a_config_says_it_is_accepted_or_refused_in_one_message(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"

    def check(case: tuple[dict[str, Any], list[str]]) -> None:
        data, overrides = case
        path.write_text(as_toml(data))
        say("train", str(path), "--dry-run", *(word for override in overrides for word in ("--set", override)))

    fuzz(number, st.tuples(CONFIGS, st.lists(OVERRIDES, max_size=2)), check)
    assert list(tmp_path.iterdir()) == [path]


def as_toml(data: dict[str, Any]) -> str:
    """Also integers that have more digits than Python writes."""
    huge: list[int] = []

    def small(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: small(item) for key, item in value.items()}
        if isinstance(value, list):
            return [small(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >> 64:
            huge.append(value)
            return f"huge {len(huge) - 1} huge"
        return value

    text = tomlkit.dumps(small(data))
    return re.sub(r'"huge (\d+) huge"', lambda found: hex(huge[int(found[1])]), text)


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_bytes_a_config_has_it_is_refused_in_one_message(number: int, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    lines = st.sampled_from(
        [
            b"[model]",
            b"[[reward]]",
            b"seed = ",
            b"a.b = ",
            b'"',
            b"[",
            b"{",
            b"=",
            b"1" * 5000,
            b"[" * 2000,
            b"\xff",
            b"\r\n",
        ]
    )

    def check(parts: list[bytes]) -> None:
        path.write_bytes(b"\n".join(parts))
        say("train", str(path), "--dry-run")

    fuzz(number, st.lists(st.one_of(lines, st.binary(max_size=20)), max_size=8), check)


# ---- data ----------------------------------------------------------------------------------------------------------------

SURROGATES = st.text(max_size=8) | st.just("\ud800") | st.just("a\udfff") | st.just("\ud83d\ude00")
JSON_LEAVES = st.one_of(
    SURROGATES, INTEGERS.filter(lambda number: abs(number) < 10**40), FLOATS, st.booleans(), st.none()
)
JSON = st.recursive(
    JSON_LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SURROGATES, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.one_of(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), JSON)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={"role": st.just("user") | JSON, "content": st.text() | st.lists(PARTS, max_size=2) | JSON, "name": JSON},
)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.one_of(st.text(max_size=8), st.lists(MESSAGES, max_size=2), JSON),
        "answer": st.one_of(st.text(max_size=8), JSON),
        "id": st.one_of(st.integers(0, 9), JSON),
        "environment": JSON,
        "other": JSON,
    },
)
RAW = st.sampled_from(["", " ", "{", "[" * 100_000, '{"prompt": ' + "[" * 900 + "]" * 900 + "}", '{"prompt": "a", "n": ' + "1" * 5000 + "}", "\ufeff{}", "NaN", '{"prompt": "a", "answer": -Infinity}', '{"prompt": "a", "answer": 1e999}', "\u2028", "null"])  # fmt: skip
LINES = st.one_of(RECORDS.map(json.dumps), RECORDS.map(json.dumps), RAW, st.text(st.characters(exclude_categories=["Cs"]), max_size=12))  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_a_data_set_holds_it_is_accepted_or_refused_by_line(number: int, tmp_path: Path) -> None:
    config, path, text = (
        tmp_path / "run.toml",
        tmp_path / "data.jsonl",
        TokenizerText(tokenizer=character_tokenizer(ALPHABET)),
    )
    config.write_text(f'[model.tiny]\n[data]\npath = "{path}"\nholdout = 0\n')

    def check(lines: list[str]) -> None:
        path.write_text("\n".join(lines), encoding="utf-8")
        try:
            tasks = read(DataConfig(path=str(path), holdout=0), seed=0).tasks
        except DataError as error:
            assert re.search(r"data\.jsonl(, line \d+: .+| has no tasks)", str(error)) and "\n" not in str(error)
        else:
            for task in tasks:
                assert (isinstance(task.prompt, str | tuple) and task.answer not in ("None", "nan")) or "a" in str(
                    lines
                )
                if isinstance(task.prompt, str):
                    text.opening(task.prompt)
        say("train", str(config), "--dry-run")

    fuzz(number, st.lists(LINES, min_size=1, max_size=3), check)


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_bytes_a_data_set_has_it_is_accepted_or_refused_in_one_message(number: int, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"

    def check(case: tuple[str, bytes]) -> None:
        name, content = case
        (tmp_path / name).write_bytes(content)
        config.write_text(f'[model.tiny]\n[data]\npath = "{tmp_path / name}"\nholdout = 0\n')
        say("train", str(config), "--dry-run")

    pieces = st.one_of(
        st.binary(max_size=40), st.just(b"PAR1"), st.just(b'{"prompt": "\xff"}'), st.just(b'{"prompt": "a"}')
    )
    content = st.lists(pieces, max_size=4).map(b"\n".join)
    fuzz(number, st.tuples(st.sampled_from(["a.jsonl", "a.parquet", "a"]), content), check)


# ---- run folders ---------------------------------------------------------------------------------------------------------

GARBAGE = st.one_of(
    st.sampled_from([b"", b"garbage", b"\xff\xfe", b"{}", b"null", b"[1]", b'{"seq":1}', b'{"seq":"x","kind":"stepped"}', b'{"seq":1,"kind":"resumed"}', b"[" * 50_000, b'{"seq":' + b"1" * 5000 + b"}"]),
    st.binary(max_size=20),
)  # fmt: skip
EVENTS = [b'{"seq":%d,%b' % (number, line[1:]) for number, line in enumerate(GOLDEN.read_bytes().splitlines())]
EDITS = st.lists(st.tuples(st.sampled_from(["insert", "delete", "replace", "cut", "swap"]), st.integers(0, len(EVENTS) - 1), GARBAGE), max_size=3)  # fmt: skip
COMMANDS = [
    ["report"],
    ["report", "--json"],
    ["advise"],
    ["trace"],
    ["audit"],
    ["audit", "--json"],
    ["status"],
    ["export"],
    ["train"],
]


def edited(edits: list[tuple[str, int, bytes]]) -> bytes:
    lines = list(EVENTS)
    for what, place, garbage in edits:
        at = min(place, len(lines) - 1)
        match what:
            case "insert":
                lines.insert(at, garbage)
            case "delete":
                del lines[at]
            case "replace":
                lines[at] = garbage
            case "cut":
                lines[at] = lines[at][: len(lines[at]) // 2]
            case "swap":
                lines[0], lines[at] = lines[at], lines[0]
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_a_run_folder_holds_every_command_reads_it_or_refuses_it(number: int, tmp_path: Path) -> None:
    def check(case: tuple[list[tuple[str, int, bytes]], list[str], bytes]) -> None:
        edits, command, config = case
        with tempfile.TemporaryDirectory(dir=tmp_path) as name:
            folder = Path(name)
            if command == ["train"]:  # a run whose log is whole would start
                edits = [*edits, ("insert", 3, b"garbage")]
            (folder / "events.jsonl").write_bytes(edited(edits))
            (folder / "config.toml").write_bytes(config)
            if command == ["export"]:
                say("export", name, str(folder / "out"))
            elif command == ["train"]:
                say("train", "--resume", name)
            else:
                say(command[0], name, *command[1:])

    valid = b'[model.tiny]\nhidden = 8\nheads = 2\nlayers = 1\n[data]\ntoy = "sort_digits"\n'
    fuzz(number, st.tuples(EDITS, st.sampled_from(COMMANDS), st.one_of(st.just(valid), GARBAGE)), check)


# ---- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_whatever_is_typed_is_accepted_or_refused_in_one_message(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [["train"], ["train", "--resume"], ["report"], ["advise"], ["trace"], ["audit"], ["status"], ["eval"], ["scale"], ["export"], ["env", "check"], ["env", "check", "--args"]]  # fmt: skip
    words = st.one_of(TEXTS, st.just("\udcff"), st.just("engines=" + "1" * 5000)).filter(lambda word: "\0" not in word)

    def check(case: tuple[list[str], list[str]]) -> None:
        command, arguments = case
        say(*command, *(["--"] if len(command) == 1 else []), *arguments)

    fuzz(number, st.tuples(st.sampled_from(commands), st.lists(words, min_size=1, max_size=2)), check)
