"""docs/sandboxes.md: its config and its environment run, and it has every key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.env.sandbox.config import SandboxConfig
from millstream.types import Task
from support.tool_talk import calling, play

DOCS = (Path(__file__).parents[2] / "docs/sandboxes.md").read_text()
CONFIG = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", DOCS, flags=re.M | re.S)[0])["environment"][0]
FIX = re.findall(r"^```python\n(.*?)^```", DOCS, flags=re.M | re.S)[0]


def test_the_environment_of_the_docs_scores_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fix.py").write_text(FIX)
    monkeypatch.chdir(tmp_path)
    assert convert(CONFIG, EnvironmentConfig, where="environment").sandbox == SandboxConfig()
    config = {"use": "fix.py:Fix", **CONFIG}
    task = Task(id="1", prompt="p", data={"files": {"test.py": "import f"}, "setup": "mkdir src"})
    assert play(config, calling("edit", command="create", path="add.py", text="print(35)"), "done", task=task)[0] == 1.0
    assert play(config, "done", task=task)[0] == 0.0


def test_every_key_of_a_sandbox_is_in_the_docs_with_its_default() -> None:
    for name in SandboxConfig.__struct_fields__:
        (default,) = re.findall(rf"^\| `{name}` \| ([^|]*)\|", DOCS, flags=re.M)
        value = getattr(SandboxConfig(), name)
        expected = f"{value:g}" if isinstance(value, int | float) else ""
        assert default.strip() in (expected, "`{}`", '`"walls"`'), name
