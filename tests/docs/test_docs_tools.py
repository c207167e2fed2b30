"""docs/tools.md: its functions, formats and configs run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.types import Task
from support.tool_talk import calling, play, results

DOCS = (Path(__file__).parents[2] / "docs/tools.md").read_text()
TOOLS, FORMAT, NOTEBOOK = re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)
CONFIGS = [tomllib.loads(text)["environment"] for text in re.findall(r"```toml\n(.*?)```", DOCS, flags=re.S)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("my_tools.py", TOOLS), ("my_format.py", FORMAT), ("notebook.py", NOTEBOOK)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_tools_of_the_docs_are_called(folder: Path) -> None:
    says = (calling("search", query="River", limit=1), calling("calculate", expression="2 + 3"), "4")
    reward, scripted = play(CONFIGS[0][0], *says)
    assert (reward, results(scripted)) == (1.0, ['["The mill stands by the river."]', "5.0"])
    assert "words that the note contains" in scripted.shown(scripted.requests[0].tokens)


def test_the_format_of_the_docs_finds_its_calls(folder: Path) -> None:
    config = {"tools": ["my_tools.py:search"], "tool_format": "my_format.py:parse"}
    assert results(play(config, "search km", "4")[1]) == ['["The river is 120 km long."]']


def test_the_notebook_of_the_docs_keeps_its_pages(folder: Path) -> None:
    says = (calling("write", text="hi"), calling("read", page=1), "done")
    reward, scripted = play({"use": "notebook.py:Notebook"}, *says, task=Task(id="1", prompt="p"))
    assert (reward, results(scripted)) == (1.0, ["This is page 1.", "hi"])


def test_the_tables_of_the_docs_are_valid() -> None:
    for config in CONFIGS[1:]:
        tables: Any = config if isinstance(config, list) else [config]
        for table in tables:
            assert convert(table, EnvironmentConfig, where="environment").tools


def test_every_key_of_a_tool_is_in_the_docs() -> None:
    from millstream.env.tools import ToolConfig

    for name in ToolConfig.__struct_fields__:
        assert f"| `{name}` |" in DOCS, name
